"""The command `quantize`: write a model folder with quantised linear layers."""

from __future__ import annotations

import argparse

from server.cli.parser import Parser

TARGETS = ("fp8", "int8", "int4")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="model folder in Hugging Face layout, or hub name")
    parser.add_argument("--to", choices=TARGETS, required=True, help="format of the linear layers")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="new folder to write")


def run(args: argparse.Namespace) -> int:
    """Write the folder and print its sizes. Raises ModelError for what the user can fix."""
    from pathlib import Path

    from engine.checkpoint.source import resolve_model
    from engine.errors import ModelError
    from engine.library.quantize import quantize_folder
    from engine.models.registry import config_from_folder
    from engine.utils.progress import Progress
    from server.formatting import human_bytes

    source = resolve_model(args.model, config_from_folder)
    if source.kind != "hf":
        raise ModelError(f"{source.name} is a GGUF file, which is quantised already: give a folder of plain weights")
    with Progress(f"quantising {source.name}", "files") as progress:
        written = quantize_folder(Path(source.path), Path(args.out), args.to, progress)
    print(
        f"wrote {args.out}: {written.matrices} matrices in {args.to}, {human_bytes(written.bytes_before)} of weights "
        f"became {human_bytes(written.bytes_after)}\nserve it with: encore serve --model {args.out}"
    )
    return 0
