"""httpx for servers on this machine. Each client of httpx loads all certificates, which takes 30 ms of CPU, unless it
verifies none."""

import functools

import httpx

from support.waiting import LONG_S

Client = functools.partial(httpx.Client, verify=False, timeout=LONG_S)
get, post, stream = (
    functools.partial(call, verify=False, timeout=LONG_S) for call in (httpx.get, httpx.post, httpx.stream)
)
