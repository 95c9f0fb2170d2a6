"""Copy the object store to and from a tar file, for infra/backup.sh. Runs in a container that has the S3 settings.

`python -m infra.objects dump > objects.tar` copies the bucket; `python -m infra.objects load < objects.tar` writes the
objects back and deletes none; `python -m infra.objects create` creates the bucket.
"""

import os
import shutil
import sys
import tarfile
import tempfile

import boto3

MEMORY = 64 * 2**20  # bytes; larger objects go through a temporary file


def dump() -> int:
    s3, bucket, count = boto3.client("s3"), os.environ["DPO_S3_BUCKET"], 0
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", []):
                response = s3.get_object(Bucket=bucket, Key=item["Key"])
                entry = tarfile.TarInfo(item["Key"])
                entry.size = response["ContentLength"]
                tar.addfile(entry, response["Body"])
                count += 1
    return count


def create() -> int:
    """Create the bucket if it does not exist."""
    s3, bucket = boto3.client("s3"), os.environ["DPO_S3_BUCKET"]
    if bucket not in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=bucket)
    return 0


def load() -> int:
    s3, bucket, count = boto3.client("s3"), os.environ["DPO_S3_BUCKET"], create()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            if content is not None:
                with tempfile.SpooledTemporaryFile(MEMORY) as spool:  # boto3 reads a part again if its upload fails
                    shutil.copyfileobj(content, spool)
                    spool.seek(0)
                    s3.upload_fileobj(spool, bucket, entry.name)
                count += 1
    return count


if __name__ == "__main__":
    count = {"create": create, "dump": dump, "load": load}[sys.argv[1]]()
    print(f"{count} objects", file=sys.stderr)
