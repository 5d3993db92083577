"""The ASGI app: routes, who may request them, and what is said when something is wrong.

Starlette routes and Jinja2 escapes; uvicorn serves. There are no accounts here, only a secret in
the address: put a proxy that asks for a password in front wherever other machines can reach it.
"""

import functools
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

import anyio
import anyio.to_thread
import jinja2
import psycopg
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgqueue import database
from pgqueue.client import JobNotFound
from pgqueue.dashboard import actions, job, pages, search, shape
from pgqueue.dashboard.pages import NotFound, Page, Reading, Row
from pgqueue.terminal import explain

HERE = Path(__file__).resolve().parent
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
CONNECTIONS = 4  # at a time, whoever asks
MOST_FORM = 65_536  # bytes
SAID = "pgqueue-said"  # a cookie: what an action did, until a page has shown it

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer a browser sends "null" as the origin of our own forms, too.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MISSING = (*database.INCOMPATIBLE, psycopg.errors.UndefinedTable)
NONSENSE = "No form of this dashboard sends that."
UNSAID = {
    HTTPStatus.NOT_FOUND: "The dashboard has no such page.",
    HTTPStatus.METHOD_NOT_ALLOWED: "Only a button on a page does that: go back, and press it.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "No form of the dashboard is that large.",
}
PAGES: dict[str, Callable[[Reading], Page]] = {
    "/": pages.queues,
    "/queue": pages.queue,
    "/jobs": search.page,
    "/running": pages.running,
    "/workers": pages.workers,
    "/batch": pages.batch,
    "/dead": pages.dead,
    "/job": job.page,
    "/schedules": pages.schedules,
    "/batches": pages.batches,
}


class Dashboard:
    """The ASGI app. It answers only to these names in the Host header, "*" being any.

    Without that check a foreign page could point its name to this machine, and read (DNS
    rebinding). When you mount it, give the names that your users see. With a secret it
    answers only to browsers that have once asked with ?secret=... in the address.
    """

    def __init__(
        self,
        dsn: str | None = None,
        allow_actions: bool = False,
        *,
        hosts: Collection[str] = LOOPBACK,
        secret: str | None = None,
    ) -> None:
        if isinstance(hosts, str):
            raise TypeError(f"hosts is a list of names, not the text {hosts!r}")
        self.secret = secret
        # Not the secret itself, which opens other browsers. Ports share their cookies.
        self.pass_ = hashlib.sha256(f"pgqueue {secret}".encode()).hexdigest()
        # Not named as a worker's would be.
        self.dsn = database.conninfo(dsn, name="pgqueue-dashboard")
        self.allow_actions = allow_actions
        self.hosts = {host.lower() for host in hosts}
        # Our own threads: those of the app that we are mounted in have other things to do.
        self.limiter = anyio.CapacityLimiter(CONNECTIONS)
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self.templates.filters.update({f.__name__: f for f in shape.FILTERS})
        self.templates.globals.update({f.__name__: f for f in shape.FUNCTIONS})
        routes = [
            Route(path, functools.partial(self.get, page))
            for path, page in PAGES.items()
        ]
        self.inner = Starlette(
            routes=[
                *routes,
                Route("/confirm", self.ask),
                Route("/action/{action}", self.post, methods=["POST"]),
                Mount("/static", StaticFiles(directory=HERE / "static")),
            ],
            exception_handlers={HTTPException: self.refuse, NotFound: self.miss},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        inner: ASGIApp = self.inner
        if scope["type"] == "http" and not self.is_known(Headers(scope=scope)):
            inner = PlainTextResponse(
                "The dashboard does not answer to that name, unless --allow-host NAME"
                " or app(hosts=[...]) says so.\n",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        elif scope["type"] == "http" and self.secret:
            inner = self.ask_for_secret(Request(scope)) or inner
        await inner(scope, receive, send_with_headers)

    def ask_for_secret(self, request: Request) -> Response | None:
        """Let in who has shown the secret before; who shows it now gets a cookie for it."""
        name = f"pgqueue-{self.pass_[:8]}"
        if hmac.compare_digest(
            request.cookies.get(name, "").encode(), self.pass_.encode()
        ):
            return None
        shown = request.query_params.get("secret", "").encode()
        if not hmac.compare_digest(shown, str(self.secret).encode()):
            return PlainTextResponse(
                "This dashboard has a secret: open the address that it printed when it started.\n",
                HTTPStatus.FORBIDDEN,
            )
        # Not left in the address, where others may see it.
        where = request.url.remove_query_params("secret")
        answer = RedirectResponse(
            where.path + (f"?{where.query}" if where.query else ""),
            HTTPStatus.SEE_OTHER,
        )
        # Lax: links from other sites get here, but their forms do not.
        base = request.scope.get("root_path", "") or "/"
        answer.set_cookie(name, self.pass_, path=base, httponly=True, samesite="lax")
        return answer

    def is_known(self, headers: Headers) -> bool:
        name = re.sub(r":\d+$", "", headers.get("host", "")).rstrip(".").lower()
        return "*" in self.hosts or name in self.hosts

    async def get(self, page: Callable[[Reading], Page], request: Request) -> Response:
        work = functools.partial(pages.read, self.dsn, page, request.query_params)
        return await self.answer(request, work, "reader")

    async def ask(self, request: Request) -> Response:
        """Show what an action would do, before it is done."""
        asked = request.query_params
        action = self.allowed(asked.get("action", ""))
        of, max_jobs, back = arguments(asked)
        if not of:
            if action not in actions.JOBS:
                raise HTTPException(HTTPStatus.BAD_REQUEST, NONSENSE)
            of = {"ids": [pages.job_id(id) for id in asked.getlist("id")]}
        work = functools.partial(actions.ask, self.dsn, action, of, max_jobs, back)
        return await self.answer(request, work, "operator")

    async def post(self, request: Request) -> Response:
        action = self.allowed(request.path_params["action"])
        if not is_from_here(request):
            raise HTTPException(
                HTTPStatus.FORBIDDEN, "That did not come from a page of this dashboard."
            )
        of, max_jobs, back = arguments(await read_form(request))
        work = functools.partial(actions.act, self.dsn, action, of, max_jobs, back)
        return await self.answer(request, work, "operator")

    def allowed(self, action: str) -> str:
        if action not in actions.ACTIONS:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if not self.allow_actions:
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "The dashboard was started without --allow-actions.",
            )
        return action

    async def answer(
        self, request: Request, work: Callable[[], Page | tuple[str, str]], role: str
    ) -> Response:
        """Do what takes time in a thread, and turn its result or error into an answer."""

        def answer() -> Response:
            try:
                found = work()
                if isinstance(found, Page):
                    return self.render(request, found)
                return self.send_to(request, *found)
            except psycopg.Error as error:
                return self.explain(request, error, role)

        return await anyio.to_thread.run_sync(answer, limiter=self.limiter)

    def send_to(self, request: Request, where: str, said: str) -> Response:
        """Redirect, so that a reload of the page that says what was done does not do it again."""
        base = request.scope.get("root_path", "")
        answer = RedirectResponse(base + where, HTTPStatus.SEE_OTHER)
        text, path = quote(said[:1000]), base or "/"
        answer.set_cookie(SAID, text, 60, path=path, httponly=True, samesite="strict")
        return answer

    def render(self, request: Request, page: Page, status: int = 200) -> Response:
        is_part = "x-part" in request.headers
        base = request.scope.get("root_path", "")
        said = "" if is_part else unquote(request.cookies.get(SAID, ""))
        may_act = self.allow_actions and page.context.get("may_act", False)
        context = {
            **page.context,
            "may_act": may_act,
            "allow_actions": self.allow_actions,
            "is_live": page.is_live,
            "base": base,
            "here": request.url.path.removeprefix(base),
            "query": request.url.query,
            "said": said,
            "layout": "part.html" if is_part else "whole.html",
        }
        text = self.templates.get_template(page.template).render(context)
        answer = HTMLResponse(text, status)
        if said:
            answer.delete_cookie(SAID, base or "/")
        return answer

    def explain(self, request: Request, error: psycopg.Error, role: str) -> Response:
        if isinstance(error, pages.LATE):
            try:
                late = pages.read(self.dsn, pages.late, {}).context
                return self.say(request, status_of(error), late["text"], late["found"])
            except psycopg.Error as later:
                error = later
        text = explain(error, role)
        if isinstance(error, MISSING):
            text = f"Install or update pgqueue in this database: {text}"
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            text = f"A standby is read-only; ask the primary: {text}"
        return self.say(request, status_of(error), text)

    def say(
        self, request: Request, status: HTTPStatus, text: str, found: Iterable[Row] = ()
    ) -> Response:
        is_live = status == HTTPStatus.SERVICE_UNAVAILABLE and request.method == "GET"
        shown = {"status": status, "text": text, "found": found}
        return self.render(request, Page("error.html", shown, is_live), status)

    async def miss(self, request: Request, error: Exception) -> Response:
        return self.say(request, HTTPStatus.NOT_FOUND, str(error))

    async def refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        text = error.detail if error.detail != status.phrase else UNSAID.get(status, "")
        answer = self.say(request, status, text)
        answer.headers.update(error.headers or {})
        return answer


def status_of(error: psycopg.Error) -> HTTPStatus:
    if database.is_outage(error) or isinstance(error, MISSING):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return HTTPStatus.FORBIDDEN
    if isinstance(error, JobNotFound):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR


def arguments(form: Mapping[str, str]) -> tuple[Row, int, str]:
    """Return what an action is for, at most how many jobs, and where to go back to."""
    back = form.get("back", "")
    try:
        of = dict(json.loads(form.get("of", "{}")))
        # Where a person types what it is for.
        of |= {name: form[name] for name in ("kind", "group_key") if form.get(name)}
        json.dumps(of, ensure_ascii=False).encode()  # half a character is not UTF-8
        if "ids" in of:
            of = {"ids": [pages.job_id(str(id)) for id in of["ids"]]}
        # To a page of ours, and no other site.
        if back and not re.fullmatch(r"/(?![/\\])[!-~]*", back):
            raise ValueError
        return of, int(form.get("max_jobs", "1000")), back
    except (NotFound, TypeError, ValueError, RecursionError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, NONSENSE) from None


async def read_form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_FORM:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def is_from_here(request: Request) -> bool:
    """Whether the browser says that the request comes from a page of this site.

    Every browser sends one of the two headers, and lets no page choose it. It sends the first
    only if the connection is trusted: https, or this machine.
    """
    headers = request.headers
    if "sec-fetch-site" in headers:
        return headers["sec-fetch-site"] == "same-origin"
    # The scheme differs behind a proxy that terminates TLS.
    _, _, name = headers.get("origin", "").partition("://")
    return name != "" and name == headers.get("host")
