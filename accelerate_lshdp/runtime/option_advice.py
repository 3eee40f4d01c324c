# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Advice in messages on how to set an option of ``LSDPPlugin``: by keyword, or without changing the script.

Needs nothing else of the package, so that every message of it can use this.
"""

from __future__ import annotations


#: Where a plan says what an option is; it decides them alone.
_PLACES_IN_PLAN = {
    "strategy": "strategy",
    "placement": "placement",
    "communication_dtype": "communication.dtype",
    "powersgd_rank": "communication.powersgd_rank",
    "powersgd_warmup_steps": "communication.powersgd_warmup_steps",
    "intra_node": "communication.intra_node",
}
#: Options that no text can give.
_KEYWORDS_ONLY = ("token_counter",)


def variable_of(option: str) -> str:
    """The environment variable of an option."""
    return f"LSDP_{option.upper()}"


def option_advice(option: str, value: str | None = None) -> str:
    """A text that says how to set an option, for the middle of a sentence.

    Args:
        option: the keyword of ``LSDPPlugin``.
        value: the one that is meant; None: whichever the user likes.
    """
    keyword = f"LSDPPlugin({option}={'...' if value is None else repr(value)})"
    if option in _KEYWORDS_ONLY:
        return keyword
    variable = f"{variable_of(option)}={'...' if value is None else value}"
    if option in _PLACES_IN_PLAN:
        variable = f"{_PLACES_IN_PLAN[option]} in the plan, or {variable} where there is none"
    return f"{keyword} (the script unchanged: {variable})"
