"""What ends a job, as opposed to a row."""


class BatchError(Exception):
    """The job cannot go on; what is written so far stays, and the message says what to do."""
