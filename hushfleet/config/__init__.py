"""The task package as devices receive it, and typed values from untrusted data."""
