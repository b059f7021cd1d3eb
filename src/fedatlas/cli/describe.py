"""`fedatlas describe`: what a site may say of its data before there is a federation."""

import argparse
from pathlib import Path

from fedatlas.cli import shared
from fedatlas.cli.progress import Counter

NAME = "describe"
SENTENCE = "Describe a site's folder in numbers, for whoever writes the federation file."
EXAMPLE = "fedatlas describe /data/livers --name north -o site-north.json"


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument("folder", type=Path, help="the site's folder")
    made.add_argument(
        "-o", "--out", type=Path, required=True, help="the description (JSON); it holds no image"
    )
    made.add_argument("--name", help="what the site is called in the federation (default: the folder's name)")
    shared.layout(made)
    made.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    made.add_argument("--quiet", action="store_true", help="show no progress on the terminal")


def call(arguments: argparse.Namespace) -> int:
    shared.require_out(arguments.out, arguments.overwrite)
    from fedatlas.planning.description import describe, require_sendable, written
    from fedatlas.planning.recognise import columns_told, recognised, site_name
    from fedatlas.transport.store import write_atomic

    reading = shared.options_of_a_layout(arguments.reading)
    name = arguments.name or site_name(arguments.folder)
    site = recognised(arguments.folder, name, arguments.format, reading)
    require_sendable(*site)
    if arguments.format is None and (note := columns_told(*site)):
        print(f"note: {note}")
    with Counter(arguments.quiet) as counter:
        text = written(describe(*site, counter.show))
    write_atomic(arguments.out, text.encode())
    print(
        f"{arguments.out}: {len(text.encode()):,} bytes that describe site {name}. Read them, then send them to the coordinator:"
    )
    print(f"  fedatlas init {arguments.out.name} … -o federation.yaml")
    return 0
