"""The options that quantize and convert share: how the source is read, and where the new file is
written.
"""

from typing import Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import option_group
from llmcli.model_loader.quantize_file import ConverterSettings, OutputSettings, SourceSettings

ALLOW_PICKLE = typer.Option(
    "--allow-pickle", help="Read pickled weights (.bin, .pt) too, without running code in them."
)
KEEP_SOURCE = typer.Option(
    "--keep-source", help="Download a checkpoint whole and keep it, instead of streaming it once."
)
AllowPickle = Annotated[bool, ALLOW_PICKLE]
KeepSource = Annotated[bool, KEEP_SOURCE]
Offline = Annotated[bool, typer.Option("--offline", help="Make no network connection.")]

SourceOptions = Annotated[
    SourceSettings,
    option_group(
        panels.SOURCE,
        tokenizer=typer.Option(
            "--tokenizer", metavar="DIR", help="Read the tokenizer's files from another folder."
        ),
        pre=typer.Option(
            "--pre",
            metavar="NAME",
            help="llama.cpp's name of the pre-tokenizer, if it is not recognized.",
        ),
        allow_pickle=ALLOW_PICKLE,
        no_mtp=typer.Option(
            "--no-mtp",
            help="Leave out the layers that predict further tokens (MTP), which only drafts use.",
        ),
        keep_source=KEEP_SOURCE,
        accept_tokenizer_differences=typer.Option(
            "--accept-tokenizer-differences",
            help="Go on if llama.cpp encodes some text differently, and record the text in the "
            "file.",
        ),
    ),
]
ConverterOptions = Annotated[
    ConverterSettings,
    option_group(
        panels.SOURCE,
        converter=typer.Option(
            "--converter",
            help="Who converts a checkpoint: llmcli itself (native), or llama.cpp's own converter, "
            "which needs the extra convert, time, and disk space for a copy; auto: llmcli itself "
            "where it has the model's family.",
        ),
        mmproj=typer.Option(
            "--mmproj",
            help="Also convert the vision or audio part, with llama.cpp's converter, to a file "
            "mmproj-NAME.gguf beside OUT, for llama-mtmd-cli. llmcli itself runs only the language "
            "part.",
        ),
    ),
]
OutputOptions = Annotated[
    OutputSettings,
    option_group(
        panels.OUTPUT,
        out=typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            help="The new file; default: NAME-TYPE.gguf next to SRC.",
        ),
        threads=typer.Option(
            "-t", "--threads", metavar="N", min=0, max=512, help="Threads; 0 uses all cores."
        ),
        dry_run=typer.Option("--dry-run", help="Print what would be written, and write nothing."),
        force=typer.Option(
            "--force",
            help="Write the file even if it is up to date, and replace a file that llmcli did not "
            "make.",
        ),
    ),
]
