"""Write a corpus (PREFIX.bin, PREFIX.idx, PREFIX.json) from text files, JSON lines or parquet.

python scripts/prepare_corpus.py --input FOLDER --extensions .py --output-prefix corpus/code --append-eod
"""

import sys

from megaring.data.prepare import PrepareConfig, prepare
from megaring.errors import UserError
from megaring.options import Parser, non_negative, number, positive


def main(argv: list[str]) -> int:
    """Prepare what ``argv`` asks for and print a summary; 2 after an error that the user can mend."""
    try:
        options = vars(parser().parse_args(argv))
        options["inputs"] = tuple(options.pop("input"))
        config = PrepareConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
        for part in prepare(config):
            print(part.describe())
    except (UserError, OSError) as error:
        print(f"prepare_corpus.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> Parser:
    """The options of this script."""
    made = Parser(prog="prepare_corpus.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = made.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="text files, .jsonl, .parquet, or folders of them")
    add("--output-prefix", required=True, metavar="PREFIX")
    add("--extensions", nargs="+", default=(), help="what to take from folders; default: text, JSON lines and parquet")
    add("--exclude", nargs="+", default=(), metavar="GLOB", help="files and folders to leave out")
    add("--json-key", default="text", help="field or column with the text; default: text")
    add("--tokenizer", default="byte", help="byte (default), or the path of a tokenizer.json")
    add("--eod-token", help="ends documents; default: eos_token of the tokenizer_config.json beside the tokenizer")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--valid-fraction", type=number, default=0.0, help="share of documents for PREFIX_valid; default: 0")
    add("--seed", type=non_negative, default=0, help="chooses the documents of PREFIX_valid; default: 0")
    add("--workers", type=positive, default=1, help="processes that tokenise; default: 1")
    add("--overwrite", action="store_true", help="replace a corpus of this name")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
