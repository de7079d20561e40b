"""The outermost layer: paths without a proxy's prefix (--root-path) and slashes at the end, and the fate of each answer."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Paths:
    """Pure ASGI around everything else, so that keys are checked for the path that is served. The scope has the `status` of the
    answer once it has begun (0 before), and whether it is `complete`."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """`root` is the prefix under which a proxy shows this server. Requests may come with it or without."""
        self.app = app
        self.root = "/" + root.strip("/") if root.strip("/") else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # There are no websockets here, and nothing to do at a server's start and end.
            return
        path: str = scope["path"]
        if self.root and (path == self.root or path.startswith(self.root + "/")):
            path = path[len(self.root):]
        scope["path"] = path.rstrip("/") or "/"
        scope["status"], scope["complete"] = 0, False

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["status"] = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                scope["complete"] = True

        await self.app(scope, receive, watched)
