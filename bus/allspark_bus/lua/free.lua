-- A request of a tenant with limits does not count any more. KEYS: use, rate of the tenant.
-- ARGV: request id, tag (another one is there: nothing changes)
-- Returns 1 if it was removed.
local h = redis.call('HMGET', KEYS[1], ARGV[1], 'requests', 'tokens')
local tag, work = string.match(h[1] or '', '^(%S+) (%d+) ')
if tag ~= ARGV[2] then return 0 end
if tonumber(h[2]) <= 1 then
  redis.call('DEL', KEYS[1])
  return 1
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], 'requests', h[2] - 1, 'tokens', string.format('%d', h[3] - work))
return 1
