-- Ends the reservation of a call. KEYS: request. ARGV: call id, 1 the answer arrived / 0 it did not
local rs = redis.call('HGET', KEYS[1], 'rs')
if not rs then return 0 end
local id, from = string.match(rs, '^(.-)|(%d+)|%d+$')
if id ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'rs')
if ARGV[2] == '0' then redis.call('HSET', KEYS[1], 'cur', from) end
return 1
