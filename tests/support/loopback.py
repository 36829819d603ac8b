"""httpx for servers on this machine. Each client of httpx loads all certificates, which takes 30 ms of CPU, unless it
verifies none."""

import functools

import httpx

Client = functools.partial(httpx.Client, verify=False)
get, post, stream = (functools.partial(call, verify=False) for call in (httpx.get, httpx.post, httpx.stream))
