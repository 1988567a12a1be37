-- Reads from a position that the reader keeps; changes nothing. KEYS: request, stream.
-- ARGV: tokens the reader has, max entries
-- Returns like take.lua: {"unknown"|"released"|"expired"} or {"ok", from, to, end status or "", reason, message, record...}.
local h = redis.call('HMGET', KEYS[1], 'st', 'n', 'es', 'rn', 'em')
if not h[1] then return {'unknown'} end
if h[1] == 'released' then return {'released'} end
local from = tonumber(ARGV[1])
if h[1] == 'ended' and redis.call('EXISTS', KEYS[2]) == 0 then return {'expired'} end
local out = {'ok', from, from, h[3] or '', h[4] or '', h[5] or ''}
if from < tonumber(h[2]) then
  local entries = redis.call('XRANGE', KEYS[2], '(' .. ARGV[1] .. '-18446744073709551615', '+', 'COUNT', ARGV[2])
  for _, e in ipairs(entries) do
    out[#out + 1] = e[2][2]
    out[3] = tonumber(string.match(e[1], '^%d+'))
  end
end
return out
