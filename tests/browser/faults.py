"""What a page does wrong in a browser, written down as it happens."""

from __future__ import annotations

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, Response

# Set before the page's own scripts run.
WATCH = """
addEventListener('securitypolicyviolation', event => {
  console.error(`content security policy: ${event.violatedDirective} ${event.blockedURI}`);
});
"""


class Faults(list[str]):
    """Console errors, exceptions, dialogs, failed requests and error answers of all pages."""

    def watch(self, context: BrowserContext) -> None:
        """Look at every page of a context from now on."""
        context.add_init_script(WATCH)
        context.on("page", self._watch_page)

    def _watch_page(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.append(f"exception: {error}"))
        page.on("requestfailed", self._request_failed)
        page.on("response", self._response)
        page.on("dialog", self._dialog)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.append(f"console: {message.text}")

    def _request_failed(self, request: Request) -> None:
        # A page that is left gives up what it was just asking for.
        if request.failure != "net::ERR_ABORTED":
            self.append(f"{request.failure}: {request.method} {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.append(f"{response.status}: {response.request.method} {response.url}")

    def _dialog(self, dialog: Dialog) -> None:
        self.append(f"dialog: {dialog.message}")
        dialog.dismiss()
