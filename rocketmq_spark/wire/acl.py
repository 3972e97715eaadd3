"""Signs requests with an access key, as brokers with access control demand.

The signature covers the values of all fields and the body, but neither the code nor the request number: it proves who
asks, and does not protect against a replay. It must be made last, when every field has its final text. Algorithm:
``AclClientRPCHook``, the same for ACL 1.0 and 2.0.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import replace

from rocketmq_spark.wire.header import Command

ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"
SIGNATURE = "Signature"


def sign(command: Command, access_key: str, secret_key: str, security_token: str | None = None) -> Command:
    """A copy of ``command`` with credentials and signature; the body is shared."""
    ext = {name: value for name, value in command.ext.items() if name != SIGNATURE}
    ext[ACCESS_KEY] = access_key
    if security_token:
        ext[SECURITY_TOKEN] = security_token
    digest = hmac.new(secret_key.encode(), signed_fields(ext), "sha1")
    digest.update(command.body)
    ext[SIGNATURE] = base64.b64encode(digest.digest()).decode()
    return replace(command, ext=ext)


def signed_fields(ext: dict[str, str]) -> bytes:
    """Values in the order of their names, which is Java's: by UTF-16 code units."""
    # The two orders differ only beyond the basic plane, and names are ASCII but for a user's own fields.
    plain = all(map(str.isascii, ext))
    names = sorted(ext) if plain else sorted(ext, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return "".join([ext[name] for name in names]).encode()
