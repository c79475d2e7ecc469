"""Routes that a model which generates text cannot serve: each says so, which "not found" would not."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http.errors import HttpError

WANTS = {"embeddings": "embeddings", "score": "scores", "rerank": "ranks", "pooling": "vectors", "classify": "classes"}
"""What each would answer with."""


def pooling_routes(model: str) -> list[Route]:
    """The routes that other engines have for models that make one vector of a text (pool)."""
    return [
        Route(f"{prefix}/{name}", _refusal(model, wanted), methods=["POST"])
        for name, wanted in WANTS.items()
        for prefix in (("/v1", "", "/v2") if name == "rerank" else ("/v1", ""))
    ]


def _refusal(model: str, wanted: str):
    async def refuse(request: HttpRequest) -> Response:
        raise HttpError(
            400,
            f"the model {model!r} generates text and does not pool, so that it gives no {wanted} "
            f"({request.url.path}); serve an embedding model with another engine for that",
            code="model_does_not_pool",
            param="model",
        )

    return refuse
