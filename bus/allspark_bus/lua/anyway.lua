-- Runs one small command that must not fail at full memory. KEYS: its key. ARGV: its name, its other arguments
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
