-- Records a request, once. KEYS: request, stream.
-- ARGV: digest, body, model, epoch, worker, created_ms, deadline_ms, priority
-- Returns {"new"|"same"|"conflict", epoch, worker}.
local h = redis.call('HMGET', KEYS[1], 'st', 'dg', 'ep', 'wk')
if h[1] and h[1] ~= 'released' then
  if h[2] == ARGV[1] then return {'same', h[3], h[4]} end
  return {'conflict', h[3], h[4]}
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'st', 'open', 'dg', ARGV[1], 'body', ARGV[2], 'md', ARGV[3], 'ep', ARGV[4],
  'wk', ARGV[5], 'cr', ARGV[6], 'dl', ARGV[7], 'pr', ARGV[8], 'n', 0, 'cur', 0, 'dt', 0)
return {'new', ARGV[4], ARGV[5]}
