"""An OpenAI-compatible server over one engine. starlette and uvicorn are imported here alone, and only when it runs."""
