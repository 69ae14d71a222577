"""Download models from the Hugging Face hub into its cache: config.json first, then only the files that are read.

An interrupted download continues: finished files are kept, and a weight file goes on at the byte where it stopped.
Other programs that use the cache (HF_HOME) find the models, and their models are found here.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError

logger = logging.getLogger(__name__)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TIMEOUT_SECONDS = 10
Check = Callable[[str], Any]
"""Called with a folder that has only config.json. Raises ModelError if the model is not supported."""

# Beside the weights. Patterns match names in the repository's top folder, except for the last two.
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt")
_TEMPLATES = "chat_templates/*.jinja"
_MODULES = "[0-9]_*/config.json"  # of sentence-transformers
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download(name: str, check: Check | None = None) -> str:
    """Return the folder of hub model `name`, after downloading what is missing of its newest revision.

    Downloads config.json, calls `check`, and only then downloads the rest. If the hub can't be reached or refuses,
    returns the revision that was downloaded last. Raises ModelError that says what to do.
    """
    with _explained(name):
        from huggingface_hub import HfApi, hf_hub_download

        try:
            folder = os.path.dirname(hf_hub_download(name, CONFIG, etag_timeout=TIMEOUT_SECONDS))
            commit = os.path.basename(folder)
            info = HfApi().model_info(name, revision=commit, timeout=TIMEOUT_SECONDS)
        except Exception as error:  # of several libraries, without a common base
            if (last := _last_download(name)) is None:
                raise
            logger.warning("%s is used as it was downloaded: the hub gave no answer (%s)", name, _reason(error))
            return last
        if check is not None and not _has_weights(folder):
            _run_check(check, name, folder)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        for file in text_files(names):
            hf_hub_download(name, file, revision=commit, etag_timeout=TIMEOUT_SECONDS)
        for file in weight_files(name, names, folder):
            if not os.path.exists(os.path.join(folder, file)):
                _download_weights(name, file, commit)
    return folder


def _last_download(name: str) -> str | None:
    """Return the folder of the revision that was downloaded last; None if it is not complete."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    try:
        folder = repository / "snapshots" / (repository / "refs" / "main").read_text("ascii").strip()
        return str(folder) if (folder / CONFIG).exists() and _has_weights(str(folder)) else None
    except OSError:
        return None


def _run_check(check: Check, name: str, folder: str) -> None:
    try:
        check(folder)
    except ModelError as error:
        raise ModelError(str(error).replace(folder + os.sep, f"hub model {name}, ")) from error


def describe(name: str) -> tuple[str, dict[str, int]]:
    """Return a folder with the config.json of hub model `name`, and the sizes of all its files. Raises ModelError."""
    with _explained(name):
        from huggingface_hub import HfApi, hf_hub_download

        folder = os.path.dirname(hf_hub_download(name, CONFIG, etag_timeout=TIMEOUT_SECONDS))
        commit = os.path.basename(folder)
        info = HfApi().model_info(name, revision=commit, files_metadata=True, timeout=TIMEOUT_SECONDS)
        return folder, {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}


def text_files(names: Iterable[str]) -> list[str]:
    """Return the files of a repository that are read beside its weights, in order."""
    return sorted(
        name
        for name in names
        if fnmatch.fnmatchcase(name, _TEMPLATES)
        or fnmatch.fnmatchcase(name, _MODULES)
        or ("/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEXT_FILES))
    )


def weight_files(name: str, names: Iterable[str], folder: str) -> list[str]:
    """Return the weight files of a repository, as the loader chooses them: by the index in `folder`, if it has one.

    Raises ModelError if the repository has no safetensors.
    """
    top = sorted(one for one in names if "/" not in one)
    if INDEX in top:
        listed = read_json_object(Path(folder, INDEX)).get("weight_map")
        if isinstance(listed, dict):
            return sorted({str(file) for file in listed.values()} & set(top))
    found = [WEIGHTS] if WEIGHTS in top else [one for one in top if one.endswith(".safetensors")]
    if not found:
        others = [one for one in top if one.endswith((".bin", ".pth", ".gguf", ".h5"))]
        raise ModelError(
            f"hub model {name!r} has no *.safetensors"
            + (f", but {', '.join(others[:3])}" if others else "")
            + "; choose a repository with safetensors, or download a .gguf file and give its path"
        )
    return found


def _has_weights(folder: str) -> bool:
    """Return whether the folder has all files that its index names, or safetensors. They are downloaded last."""
    if os.path.exists(os.path.join(folder, INDEX)):
        listed = read_json_object(Path(folder, INDEX)).get("weight_map")
        files = set(listed.values()) if isinstance(listed, dict) else set()
        return bool(files) and all(os.path.exists(os.path.join(folder, str(file))) for file in files)
    return any(file.endswith(".safetensors") for file in os.listdir(folder))


def _download_weights(name: str, file: str, commit: str) -> None:
    """Download a large file to the cache, continuing an interrupted download, and verify its hash.

    huggingface_hub starts a file again after an interruption (since 2.0), which costs hours for a large one.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file, revision=commit)
    found = get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS)
    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    is_hashed = found.etag is not None and _SHA256.fullmatch(found.etag) is not None
    if is_hashed and found.size and found.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        blob = repository / "blobs" / str(found.etag)
        blob.parent.mkdir(parents=True, exist_ok=True)
        # The token is for the hub only: large files come from another host, by a signed URL.
        is_hub = urlsplit(found.location).netloc == urlsplit(url).netloc
        headers = build_hf_headers(token=None if is_hub else False) | {"accept-encoding": "identity"}
        with _locked(Path(f"{blob}.partial")) as sink:
            if not blob.exists():
                sink.seek(0, os.SEEK_END)
                if sink.tell() > found.size:
                    sink.truncate(0)
                    sink.seek(0)
                http_get(
                    found.location, sink, resume_size=sink.tell(), headers=headers, expected_size=found.size,
                    displayed_filename=file,
                )  # fmt: skip
                _verify(sink, str(found.etag), name, file)
                os.replace(f"{blob}.partial", blob)
    # Links the file into the snapshot; downloads it if the branch above did not.
    hf_hub_download(name, file, revision=commit, etag_timeout=TIMEOUT_SECONDS)


def _verify(sink: Any, sha256: str, name: str, file: str) -> None:
    sink.flush()
    os.fsync(sink.fileno())
    sink.seek(0)
    actual = hashlib.file_digest(sink, "sha256").hexdigest()
    if actual != sha256:
        sink.truncate(0)  # the next download starts again
        raise ModelError(f"{file} of {name} was damaged on the way: SHA-256 is {actual}, expected {sha256}; pull again")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """Open a file for reading and writing while no other process has it open so; wait for another download."""
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:  # the other process finished it: renamed
                same = False
            if not same:
                continue
            try:
                yield file
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.getsize(path) == 0:
                        os.unlink(path)
            return


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of the hub's library into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # hub errors have no common base class: network, missing, gated, disk
        from huggingface_hub.errors import RemoteEntryNotFoundError

        if isinstance(error, RemoteEntryNotFoundError):
            raise ModelError(
                f"hub model {name!r} has no {CONFIG}: choose a repository in Hugging Face layout, or download its "
                ".gguf file and give the path"
            ) from error
        raise ModelError(
            f"model {name!r} is not a local folder, is not in the local hub cache, and could not be "
            f"downloaded from the hub ({_reason(error)}); check the name and the network, set HF_TOKEN for a gated "
            "model, or download it elsewhere and give the folder's path"
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
