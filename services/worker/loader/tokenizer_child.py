"""The process that builds a checkpoint's tokenizer to see whether it can be used. Imports nothing of the project.

It is run by path, without an environment. It reads tokenizer.json from its standard input, takes a text there and back
as each gateway will, and prints why that fails, or nothing. A tokenizer that takes more memory or processor time than
its limits ends the process.
"""

import os
import resource
import sys

MEMORY_BYTES = 1 << 30
CPU_S = 8


def main() -> None:
    """Reads, checks, prints."""
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
        tokenizer.decode(tokenizer.encode("a", add_special_tokens=False).ids, skip_special_tokens=False)
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # A panic of the library's Rust code is no Exception.
        print(f"{error}"[:400])


if __name__ == "__main__":
    main()
