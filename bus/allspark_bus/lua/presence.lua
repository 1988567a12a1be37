-- Says that a broker lives, and tells who else does. KEYS: brokers. ARGV: id, ttl_ms, 1 if it lives (0: it only asks)
-- Who has not said so for ttl_ms is gone; its entry is removed, unless the caller was silent itself: then perhaps
-- nobody could speak. Returns {1 if the caller was known to live else 0, id...}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
local oldest = now - tonumber(ARGV[2])
local was_known = 0
for i = 1, #found, 2 do
  if found[i] == ARGV[1] and tonumber(found[i + 1]) >= oldest then was_known = 1 end
end
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[1], string.format('%d', now), ARGV[1])
  redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[2]))
end
local out = {was_known}
for i = 1, #found, 2 do
  if tonumber(found[i + 1]) >= oldest or (found[i] == ARGV[1] and ARGV[3] == '1') then
    out[#out + 1] = found[i]
  elseif was_known == 1 then
    redis.call('ZREM', KEYS[1], found[i])
  end
end
return out
