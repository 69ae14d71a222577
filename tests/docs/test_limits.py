"""The limits in docs/operations.md are those of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.checkpoint.regular_files import size_limit
from engine.client import output_queue
from engine.config import EngineConfig
from engine.protocol import sampling_params as sampling
from engine.protocol import structured_outputs as grammars
from engine.text import added_tokens as added
from engine.text import folder_tokenizer
from server.cli.settings import NOT_OFFERED
from server.config import ServerConfig
from server.http import connections
from server.schemas import requests, tools
from server.serving import jobs

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text("utf-8")
SECTION = PAGE.partition("\n## Limits\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", SECTION, re.MULTILINE)
]
SETTINGS = {row[0].strip("`"): row[1] for row in ROWS if row[0].startswith("`--")}
FIXED = {row[0].replace("`", ""): row[1] for row in ROWS if not row[0].startswith(("`--", "---", "setting", "limit"))}
IS_LIMIT = re.compile(r"max_\w+|\w+_seconds|\w+_bytes|\w+_entries")
OTHERS = {"max_model_len", "max_num_batched_tokens", "max_replicas"}  # sizes, in the table of all settings


def test_every_limit_is_listed_with_its_default() -> None:
    fields = [*dataclasses.fields(ServerConfig), *dataclasses.fields(EngineConfig)]
    limits = {one.name: one.default for one in fields if IS_LIMIT.fullmatch(one.name) and one.name not in OTHERS}
    limits = {name: value for name, value in limits.items() if name not in NOT_OFFERED}
    assert {f"--{name.replace('_', '-')}" for name in limits} == set(SETTINGS)
    for name, default in limits.items():
        cell = SETTINGS[f"--{name.replace('_', '-')}"]
        if name == "max_num_seqs":
            continue  # chosen for the machine
        assert cell.split()[0].rstrip(":") == ("none" if default is None else str(default)), name


VALUES = {
    "headers of a request": (connections.HEADER_BYTES,),
    "chunk extensions and trailers of a body": (connections.FRAMING_BYTES,),
    "a stream's unread output": (output_queue.UNREAD_BYTES, output_queue.UNREAD_BYTES_PER_SEQUENCE),
    "tools": (tools.MAX_TOOLS,),
    "n and best_of": (sampling.MAX_N,),
    "hidden states of a prompt": (jobs.MAX_HIDDEN_VALUES,),
    "stop": (sampling.MAX_STOP_STRINGS, sampling.MAX_STOP_CHARS),
    "stop_token_ids": (sampling.MAX_STOP_TOKEN_IDS,),
    "logit_bias": (sampling.MAX_BIASED_TOKENS,),
    "rid and X-Request-Id": (requests.MAX_ID_CHARS,),
    "a regex, grammar or JSON schema": (grammars.MAX_GRAMMAR_CHARS,),
    "tokenizer.json, vocab.json, merges.txt, tokenizer.model, an index of weights": (size_limit("tokenizer.json"),),
    "other .json files of a model": (size_limit("config.json"),),
    "a chat template's file": (size_limit("chat_template.jinja"),),
    "added tokens of a tokenizer": (added.MAX_ADDED_TOKENS, added.MAX_TOKEN_CHARS, added.MAX_ADDED_CHARS),
    "entries of a tokenizer.json": (
        folder_tokenizer.MAX_ENTRIES,
        added.MAX_TOKEN_CHARS,
        folder_tokenizer.MAX_ENTRY_CHARS,
        folder_tokenizer.MAX_PART_BYTES,
    ),
}
MESSAGE = {"role": "user", "content": "a"}
BODIES = {
    "messages of a conversation": lambda count: {"messages": [MESSAGE] * count},
    "role": lambda count: {"messages": [MESSAGE | {"role": "r" * count}]},
    "cache_salt, extra_key": lambda count: {"messages": [MESSAGE], "cache_salt": "a" * count},
}


def numbers(cell: str) -> list[int]:
    return [int(found) for found in re.findall(r"(?<![\d,])\d+(?![\d,])", cell)]


def test_every_limit_without_a_setting_is_checked_here() -> None:
    assert set(FIXED) == set(VALUES) | set(BODIES)


@pytest.mark.parametrize("name", VALUES)
def test_a_limit_without_a_setting_is_the_codes(name: str) -> None:
    assert tuple(numbers(FIXED[name])[: len(VALUES[name])]) == VALUES[name]


@pytest.mark.parametrize("name", BODIES)
def test_a_limit_of_a_body_holds(name: str) -> None:
    (limit,) = numbers(FIXED[name])
    requests.ChatBody.model_validate(BODIES[name](limit))
    with pytest.raises(ValidationError):
        requests.ChatBody.model_validate(BODIES[name](limit + 1))
