-- Forgets a request; a tombstone stays for a while. KEYS: request, stream. ARGV: tombstone_ttl_ms
-- Returns {"ok"|"released"|"unknown", worker, model, "open"|"ended"}.
local h = redis.call('HMGET', KEYS[1], 'st', 'wk', 'md')
if not h[1] then return {'unknown', '', '', ''} end
if h[1] == 'released' then return {'released', '', '', ''} end
redis.call('DEL', KEYS[1], KEYS[2])
if tonumber(ARGV[1]) > 0 then
  redis.call('HSET', KEYS[1], 'st', 'released')
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
redis.call('PUBLISH', KEYS[2], 'released')
return {'ok', h[2], h[3], h[1]}
