"""GET /docs: the OpenAPI document as a page for browsers, with all its files from this server."""

DOCUMENT = "/openapi.json"
DOCS = "/docs"
FILES = f"{DOCS}/files"
PATHS = frozenset({DOCUMENT, DOCS, f"{FILES}/swagger-ui-bundle.js", f"{FILES}/swagger-ui.css"})
