"""Keeps user names, passwords and keys of URLs out of everything that is printed, logged, written or published."""

from __future__ import annotations

import re

_HIDDEN = "***"


def without_secrets(text: str) -> str:
    """The text with ``***`` for the user, the password and the query of every URL in it.

    Of ``s3://KEY:SECRET@bucket/shards?token=1``, ``s3://***@bucket/shards?***`` is left. The keys of object stores may
    contain slashes, so if anything but a port follows a colon, all up to the last ``@`` is hidden.
    """
    return re.sub(r'([A-Za-z][\w+.-]*://)([^\s"<>]+)', _public, text)


def _public(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    rest, asked, _ = rest.partition("?")
    host = rest.partition("/")[0]
    of_user = "@" in host or (":" in host and not host.rpartition(":")[2].isdigit())
    if of_user and "@" in rest:
        rest = f"{_HIDDEN}@{rest.rpartition('@')[2]}"
    return scheme + rest + (f"?{_HIDDEN}" if asked else "")


class Url(str):
    """A path or URL whose ``repr``, which messages show, hides user, password and query, as that of `httpx.URL` does.

    Everything that opens the file gets the whole text.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_secrets(str(self)))
