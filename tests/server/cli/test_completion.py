"""`encore completion`: the scripts complete in real shells, from the same parsers as the commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from server.cli import main as cli

WORDS = [
    # words before the cursor, some of what is offered, some of what is not
    ([""], ["serve", "bench", "models", "completion"], ["--help"]),
    (["se"], ["serve"], ["bench"]),
    (["--v"], ["--version"], ["--model"]),
    (["serve", "--max-num"], ["--max-num-seqs", "--max-num-batched-tokens"], ["--model"]),
    (["serve", "--no-enable-pre"], ["--no-enable-prefix-caching"], []),
    (["serve", "--port", "9", "--dtype", ""], ["auto", "bfloat16", "float32"], ["serve", "--port"]),
    (["serve", "--dtype", "b"], ["bfloat16"], ["auto"]),
    (["serve", "--port", ""], [], ["serve", "auto", "--port"]),
    (["serve", "--model", "Qwen/Qwen3-0"], ["Qwen/Qwen3-0.6B"], ["Qwen/Qwen3-8B"]),
    (["serve", "--config", "mod"], ["models.yaml"], []),
    (["models", ""], ["list", "pull", "remove", "show"], ["serve"]),
    (["models", "show", "--"], ["--json", "--help"], ["--model"]),
    (["models", "pull", "Qwen/Qwen3-4"], ["Qwen/Qwen3-4B"], ["list"]),
    (["bench", "--bat"], ["--batch-sizes"], ["--request-rate"]),
    (["bench", "s"], ["serve"], []),
    (["bench", "serve", "--"], ["--request-rate", "--plot"], ["--batch-sizes", "--max-num-seqs"]),
    (["bench", "serve", "http://x", "--dataset", "s"], ["sharegpt", "shared-prefix"], ["random"]),
    (["batch", "mod"], ["models.yaml"], []),
    (["completion", ""], ["bash", "fish", "zsh"], []),
]


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The script of a shell in a folder with the file models.yaml."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    capsys.readouterr()
    assert cli.main(["completion", shell]) == 0
    path = tmp_path / f"encore.{shell}"
    path.write_text(capsys.readouterr().out)
    (tmp_path / "models.yaml").touch()
    return path


def run(script: Path, *command: str) -> list[str]:
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def check(offered: list[list[str]]) -> None:
    for (words, wanted, unwanted), found in zip(WORDS, offered, strict=True):
        assert set(wanted) <= set(found), (words, found)
        assert not set(unwanted) & set(found), (words, found)


def blocks(lines: list[str]) -> list[list[str]]:
    """Split the lines at each line "@"."""
    found: list[list[str]] = []
    for line in lines:
        if line == "@":
            found.append([])
        else:
            found[-1].append(line)
    return found


def quoted(words: list[str]) -> str:
    return " ".join(f"'{word}'" for word in words)


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes(script: Path) -> None:
    calls = "\n".join(
        f"COMP_WORDS=(encore {quoted(words)}); COMP_CWORD={len(words)}; _encore; echo @; printf '%s\\n' "
        '"${COMPREPLY[@]}"'
        for words, *_ in WORDS
    )
    check(blocks(run(script, "bash", "-c", f"source {script}\n{calls}")))
    # bash splits a word at "="
    call = "COMP_WORDS=(encore serve --dtype = bf); COMP_CWORD=4; _encore; echo ${COMPREPLY[@]}"
    assert run(script, "bash", "-c", f"source {script}\n{call}") == ["bfloat16"]
    call = "COMP_WORDS=(encore serve --dtype =); COMP_CWORD=3; _encore; echo ${COMPREPLY[@]}"
    assert "bfloat16" in run(script, "bash", "-c", f"source {script}\n{call}")[0]
    assert run(script, "bash", "-c", f"source {script}; complete -p encore") == ["complete -F _encore encore"]


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes(script: Path) -> None:
    calls = "\n".join(f"echo @; complete -C 'encore {' '.join(words)}'" for words, *_ in WORDS)
    lines = run(script, "fish", "--no-config", "-c", f"source {script}\n{calls}")
    check(blocks([line.split("\t")[0] for line in lines]))


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_completes(script: Path) -> None:
    # outside of its line editor, zsh's own functions are replaced by ones that print what they are given
    stubs = """
compdef() { }
compset() { word="${word#*=}" }
_describe() {
  local name=${@[-1]} one
  for one in "${(@P)name}"; do [[ $one == $word* ]] && print -r -- "${one%%:*}"; done
}
_files() { local one; for one in *; do [[ $one == $word* ]] && print -r -- $one; done }
"""
    calls = "\n".join(
        f"print @; words=(encore {quoted(words)}); CURRENT={len(words) + 1}; _encore" for words, *_ in WORDS
    )
    assert run(script, "zsh", "-n", str(script)) == []
    check(blocks(run(script, "zsh", "-f", "-c", f"{stubs}\nsource {script}\n{calls}\ntrue")))
    call = "words=(encore serve --dtype=b); CURRENT=3; _encore; true"
    assert run(script, "zsh", "-f", "-c", f"{stubs}\nsource {script}\n{call}") == ["bfloat16"]


def test_every_flag_of_every_command_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        found = capsys.readouterr().out
        for name in cli.COMMANDS:
            for flag in cli.build_parser(name).subcommands()[name].flags():
                assert (flag if shell != "fish" else f"-l {flag[2:]}") in found or not flag.startswith("--")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["completion", "csh"])
    assert exit_.value.code == 2 and "csh" in capsys.readouterr().err
