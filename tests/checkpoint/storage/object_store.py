"""An object store on this machine, of which several processes see the same, for the tests of checkpoints at URLs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class ObjectStore:
    """The store, from outside.

    Attributes:
        environ: With these variables, ``s3://checkpoints/...`` is in it.
        client: An S3 client that has nothing to do with fsspec.
    """

    environ: dict[str, str]
    client: Any

    def names(self, prefix: str) -> list[str]:
        """The names of all objects whose names begin so, without that beginning."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(entry["Key"].removeprefix(prefix) for entry in found)

    def checkpoints(self, prefix: str) -> list[str]:
        """The files and folders right below."""
        return sorted({name.partition("/")[0] for name in self.names(prefix)})

    def get(self, name: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return content

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store with an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        yield ObjectStore({**_CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}, client)
    finally:
        server.stop()
