-- What GenerateStatus tells (spec 3.6). KEYS: request, stream.
-- ARGV: a call whose answer is known to have arrived or "", deferral_ms
-- While somebody reads and tokens, or the tensors of the terminal record, are left to fetch, the end is held back for at most deferral_ms after it
-- happened, so that a loop of Get and GenerateStatus misses nothing. Once told it stays told.
-- Returns {"unknown"|"released"|"expired"} or {"ok", status, reason, message}.
local h = redis.call('HMGET', KEYS[1], 'st', 'n', 'cur', 'rs', 'rd', 'es', 'rn', 'em', 'et', 'td', 'ot')
if not h[1] then return {'unknown'} end
if h[1] == 'released' then return {'released'} end
local n = tonumber(h[2])
if h[1] == 'open' then return {'ok', n > 0 and 2 or 0, '', ''} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'expired'} end
local cursor = tonumber(h[3])
if h[4] then
  local id, from = string.match(h[4], '^(.-)|(%d+)|%d+$')
  if id ~= ARGV[1] then cursor = tonumber(from) end
end
if cursor < n + (h[11] and 1 or 0) and not h[10] then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  -- Both sides, because the end is stamped by another machine's clock.
  if h[5] and math.abs(now - tonumber(h[9])) < tonumber(ARGV[2]) then return {'ok', 2, '', ''} end
  redis.call('HSET', KEYS[1], 'td', 1)
end
return {'ok', tonumber(h[6]), h[7], h[8]}
