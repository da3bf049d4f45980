"""Hostile chat templates: each wants more time or memory than a rendering may have, or to reach beyond the sandbox."""

from collections.abc import Mapping


def _repeated(start: str, times: int, step: str, out: str = "a.v") -> str:
    """A template that applies `step` to `a.v` many times."""
    loop = "{% for i in range(" + str(times) + ") %}{% set a.v = " + step + " %}{% endfor %}"
    return "{% set a = namespace(v=" + start + ") %}" + loop + "{{ " + out + " }}"


_LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with text": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "eight loops": "{% for a in range(99) %}" * 8 + "{% endfor %}" * 8,
    "loop over a product": "{% for a in range(99999)|list * 80 %}{{ a }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "two recursions": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop([a]) }}{% endfor %}",
    "macros in macros": "{% macro f() %}{{ caller()*9 }}{% endmacro %}"
    + "{% call f() %}" * 9
    + "x"
    + "{% endcall %}" * 9,
    "list of lists": _repeated("[1]", 99999, "a.v + a.v"),
    "groups": "{% for a in range(9999) %}{{ range(99999)|groupby('x')|list|length }}{% endfor %}",
}
_NUMBERS = {
    "power": "{{ 9 ** 9 ** 9 }}",
    "power of a variable": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "power of 64": _repeated("9", 9, "a.v ** 64"),
    "filter of a power": "{{ (2 ** 64) ** 64 ** 64 }}",
    "product of powers": _repeated("9", 99, "a.v * a.v"),
    "digits of a power": _repeated("9", 24, "a.v * a.v", "a.v|string|length"),
    "remainder": _repeated("9", 26, "a.v * a.v", "a.v % 7"),
    "division": _repeated("9", 25, "a.v * a.v", "a.v // 3"),
    "round": "{{ 1.5|round(999999999) }}",
    "negative power": "{{ 2 ** -99999999999 }}",
    "sum": "{{ range(99999)|sum(start=9**64) * 9 ** 64 }}{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
}
_CONSTANTS = {
    "folded power": "{% if 9 ** 9 ** 9 %}x{% endif %}",
    "folded string": "{{ 'x' * 99999999999 }}",
    "folded list": "{{ [0] * 99999999999 }}",
    "folded tuple": "{{ (0,) * 9999999999 }}",
    "folded product of powers": "{{ (9 ** 9999999) * (9 ** 9999999) }}",
    "folded filter": "{{ 'x'|center(9999999999) }}",
    "folded format": "{{ '%9999999999d' % 1 }}",
    "folded indent": "{{ ('x\n' * 999999)|indent(99999) }}",
    "folded range": "{{ range(99999)|list|string * 9999 }}",
    "folded join": "{{ (range(99999)|list)|join('x' * 99999) }}",
    "folded replace": "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
}
_TEXTS = {
    "center": "{% set n = 9999999999 %}{{ messages|string|center(n) }}",
    "center below the limit": "{% for i in range(99999) %}{{ 'x'|center(8000000) }}{% endfor %}",
    "indent": "{% set n = 99999999 %}{{ 'x\n\n'|indent(n, true, true) }}",
    "indent with a text": "{{ ('x\n' * 99999)|indent('y' * 9999) }}",
    "format": "{% set f = '%0' ~ 9999999999 ~ 'd' %}{{ f|format(1) }}",
    "format method": "{% set f = '{:>' ~ 9999999999 ~ '}' %}{{ f.format(1) }}",
    "ljust": "{% set n = 9999999999 %}{{ 'x'.ljust(n) }}",
    "zfill": "{% set n = 9999999999 %}{{ 'x'.zfill(n) }}",
    "expandtabs": "{% set n = 2000000000 %}{{ '\t\t\t'.expandtabs(n) }}",
    "replace": "{% set x = 'x' * 8000000 %}{{ x.replace('x', x) }}",
    "replace filter": "{% set x = 'x' * 8000000 %}{{ x|replace('x', x) }}",
    "join": "{% set x = 'x' * 8000000 %}{{ range(99999)|join(x) }}",
    "join method": "{% set x = 'x' * 8000000 %}{{ x.join(x) }}",
    "doubling": _repeated("'xx'", 60, "a.v ~ a.v"),
    "doubling by plus": _repeated("'xx'", 60, "a.v + a.v"),
    "doubling by blocks": "{% set x = 'xxxxxxxx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x }}",
    "doubling by format": _repeated("'xx'", 60, "'%s%s' % (a.v, a.v)"),
    "doubling by join": _repeated("'xx'", 60, "[a.v, a.v]|join"),
    "wordwrap": "{{ ('x ' * 4000000)|wordwrap(1) }}",
    "wordwrap with a text": "{{ ('x ' * 99999)|wordwrap(1, true, 'y' * 99999) }}",
    "urlize": "{{ ('http://a.b ' * 700000)|urlize }}",
    "lipsum": "{{ lipsum(n=9999999, min=99, max=999) }}",
    "striptags": "{{ ('<' * 8000000)|striptags }}",
    "title": "{% for i in range(9999) %}{{ ('x ' * 4000000)|title|length }}{% endfor %}",
    "json": "{% for i in range(9999) %}{{ (['x' * 99] * 80000)|tojson|length }}{% endfor %}",
    "json indent": "{{ (range(99999)|list)|tojson(indent=99999) }}",
    "json separators": "{{ (range(99999)|list)|tojson(separators=('x' * 999999, 'y')) }}",
    "split": "{% for i in range(9999) %}{{ ('x ' * 4000000).split()|length }}{% endfor %}",
    "output without end": "{% for i in range(99999) %}{{ 'x' * 8000000 }}{% endfor %}",
    "strftime": "{{ strftime_now('%c' * 2000000) }}",
    "escapes": "{{ ('<' * 8000000)|e|e|e|e|e }}",
}
_SORTS = {
    "sort": "{% for i in range(9999) %}{{ range(99999)|sort(reverse=true)|length }}{% endfor %}",
    "slice": "{{ range(99999)|slice(99999999)|list|length }}",
    "batch": "{{ range(9)|batch(999999999, 'x')|list|length }}",
    "unique": "{% for i in range(9999) %}{{ (range(99999)|list * 80)|unique|list|length }}{% endfor %}",
    "map": "{{ (range(99999)|list * 80)|map('string')|list|string|length }}",
    "cycle": "{% for i in range(99999) %}{{ (range(99999)|list * 80)|max }}{% endfor %}",
}
_COMPILES = {
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long expression": "{{ " + "1+" * 400_000 + "1 }}",
    "many loops": "{% for a in b %}{% endfor %}" * 60_000,
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep nots": "{{ " + "not " * 20_000 + "1 }}",
}
_ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format of attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "import": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "include": "{% include '/etc/passwd' %}",
    "attr": "{{ ''|attr('__class__') }}",
}
HOSTILE: Mapping[str, str] = {
    **_LOOPS, **_NUMBERS, **_CONSTANTS, **_TEXTS, **_SORTS, **_COMPILES, **_ESCAPES
}  # fmt: skip
"""At least 74 templates by name."""
SHORT = ("nested loops", "power of a variable", "folded power", "center", "indent", "doubling", "join method",
         "deep blocks", "long expression", "classes", "import")  # fmt: skip
"""One or two of each class."""
