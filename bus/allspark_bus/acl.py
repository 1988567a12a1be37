"""The Redis ACL of the fleet's user: our keys, our channels, and the commands that we use."""

#: Called directly or by the fleet's scripts; connecting needs the first line.
COMMANDS = (
    *("ping", "select", "client|setinfo"),
    *("role", "wait", "cluster|slots", "asking"),  # with Sentinels, replicas or a cluster
    *("evalsha", "script|load", "subscribe", "unsubscribe", "publish", "time", "scan"),
    *("del", "exists", "pexpire", "hget", "hmget", "hgetall", "hset", "hdel", "sadd", "srem", "smembers"),
    *("zadd", "zrem", "zrange", "zcard", "xadd", "xrange", "xrevrange"),
)
#: A producer that reads its own results.
READER_COMMANDS = (
    "ping",
    "select",
    "client|setinfo",
    "subscribe",
    "unsubscribe",
    "xrange",
    "xrevrange",
    "xread",
)


def user_line(name: str, password_sha256: str) -> str:
    """The line of an ACL file for processes of the fleet. `password_sha256`: lower-case hexadecimal."""
    return _line(name, password_sha256, "~as:* &as:*", COMMANDS)


def reader_line(name: str, password_sha256: str, tenant: str) -> str:
    """The line for a producer: the streams of one tenant's requests, read only."""
    results = f"as:out:{{{tenant}/*"
    return _line(name, password_sha256, f"%R~{results} &{results}", READER_COMMANDS)


def _line(name: str, password_sha256: str, patterns: str, commands: tuple[str, ...]) -> str:
    allowed = " ".join(f"+{command}" for command in commands)
    return f"user {name} reset on #{password_sha256} {patterns} {allowed}"
