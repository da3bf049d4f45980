"""Compiles forms of answers in a process of its own, with hard limits of time and memory. Knows no requests.

One JSON list [field, text] on each line of the input; one JSON string on each line of the output: why the form cannot
be compiled, or an empty one. A form that exceeds a limit ends the process without an answer: no limit within the
compiler bounds all cases (`multipleOf` of seven digits takes minutes and gigabytes).
"""

import json
import resource
import signal
import sys

from llguidance import LLTokenizer

from services.forms.form import Form
from services.forms.grammar import FormError, compile_form

SECONDS = 2.0
"""Processor time for one form."""
MEMORY = 1 << 30
"""Bytes of address space of the process."""
_WORN = 256 << 10
"""KiB of memory after which the process ends: the next form gets a new one."""


def main() -> None:
    """Answers until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")  # Each byte is a token: what a form accepts does not depend on a vocabulary.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # Its signal ends the process, also within the compiler.
        reason = _reason(Form(*json.loads(line)), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reason) + "\n")
        sys.stdout.flush()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _WORN:
            return


def _reason(form: Form, tokenizer: LLTokenizer) -> str:
    try:
        compile_form(form, tokenizer)
    except FormError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
