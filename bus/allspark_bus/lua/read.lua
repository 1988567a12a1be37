-- Reads from a position that the reader keeps; changes nothing. KEYS: request, stream.
-- ARGV: position (tokens the reader has, one more once it has the tensors of the terminal record), max entries
-- Returns like take.lua: {"unknown"|"released"|"expired"|"damaged"} or {"ok", from, to, end status or "", reason, message, record...}.
local h = redis.call('HMGET', KEYS[1], 'st', 'n', 'es', 'rn', 'em', 'ot')
if not h[1] then return {'unknown'} end
if h[1] == 'released' then return {'released'} end
local from = tonumber(ARGV[1])
if h[1] == 'ended' and redis.call('EXISTS', KEYS[2]) == 0 then return {'expired'} end
local out = {'ok', from, from, h[3] or '', h[4] or '', h[5] or ''}
local n = tonumber(h[2])
if from < n or (from == n and h[6]) then
  local first = from < n and '(' .. ARGV[1] .. '-18446744073709551615' or n .. '-1'
  local entries = redis.call('XRANGE', KEYS[2], first, '+', 'COUNT', ARGV[2])
  if #entries == 0 then return {'damaged'} end
  for _, e in ipairs(entries) do
    out[#out + 1] = e[2][2]
    local length, is_last = string.match(e[1], '^(%d+)-(%d)')
    out[3] = tonumber(length) + (h[6] and tonumber(is_last) or 0)
  end
end
return out
