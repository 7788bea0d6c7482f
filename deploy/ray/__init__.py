"""Replicas of the server under Ray Serve.

From the repository's root, or with it as working_dir of a cluster's job:

    serve run deploy.ray:app
    serve run deploy.ray:app model-path=Qwen/Qwen3-8B max-replicas=4 routing=session
"""

from deploy.ray.application import app

__all__ = ["app"]
