"""HTTP server with the routes and fields of OpenAI and vLLM. Depends on AsyncLLM only, never on the engine class."""
