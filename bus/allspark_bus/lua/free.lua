-- A request of a tenant with limits does not count any more. KEYS: use, rate of the tenant.
-- ARGV: request id, tag (another one is there: nothing changes), tokens it generated ("": not known; "none": it was never
-- recorded).
-- What its rate was charged for tokens that were not generated comes back; once, since the entry goes with it.
-- Returns 1 if it was removed.
local h = redis.call('HMGET', KEYS[1], ARGV[1], 'requests', 'tokens')
local tag, work = string.match(h[1] or '', '^(%S+) (%d+) ')
if tag ~= ARGV[2] then return 0 end
local charged, unused = string.match(h[1], '^%S+ %d+ %d+ (%d+) (%d+)$')
local back = 0
if ARGV[3] == 'none' then
  back = tonumber(charged or 0)
elseif ARGV[3] ~= '' then
  back = math.max(0, tonumber(unused or 0) - tonumber(ARGV[3]))
end
-- A bucket that is gone is full. The next admission cuts what is more than its size.
local level = back > 0 and redis.call('HGET', KEYS[2], 'level')
if level then redis.call('HSET', KEYS[2], 'level', tostring(level + back)) end
if tonumber(h[2]) <= 1 then
  redis.call('DEL', KEYS[1])
  return 1
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], 'requests', h[2] - 1, 'tokens', string.format('%d', h[3] - work))
return 1
