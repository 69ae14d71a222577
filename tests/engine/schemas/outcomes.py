"""Run schemas through an engine and check what it wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema

from engine import Engine, SamplingParams
from engine.errors import RequestError
from tests.engine.lively import drain, request, tokens

MAX_TOKENS = 600


def outcomes(engine: Engine, schemas: Sequence[dict[str, Any]], seed: int, temperature: float) -> Counter[str]:
    """Generate one answer per schema in one batch. Returns how often each finish reason came, "refused" included.

    Fails if an answer that ended by itself does not validate, or if a request failed for another reason than that its
    schema was refused with a path.
    """
    loop, found = engine.loop, Counter[str]()
    tokenizer = engine.tokenizer
    for number, schema in enumerate(schemas):
        params = SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed + number, temperature=temperature, structured_outputs={"json": schema}
        )
        loop.add(request(str(number), [5 + number], params))
    for name, events in drain(loop).items():
        schema, last = schemas[int(name)], events[-1]
        if last.finish_reason == "error":
            assert isinstance(last.refusal, RequestError), (schema, last)
            assert str(last.refusal).startswith("structured_outputs.json"), (schema, str(last.refusal))
            found[f"refused: {str(last.refusal).rpartition(': ')[2][:60]}"] += 1
            continue
        found[last.finish_reason] += 1
        if last.finish_reason == "stop":
            text = tokenizer.decode(tokens(events), skip_special_tokens=True)
            draft = jsonschema.Draft202012Validator
            validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
            validator.validate(json.loads(text))
    return found
