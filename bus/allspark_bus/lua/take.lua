-- Takes what the server-side cursor has not delivered and moves the cursor (R4). KEYS: request, stream.
-- ARGV: call id, id of an earlier call whose answer has arrived ("" for none), reservation_ms, max entries
-- The cursor counts tokens, and one more once the tensors of the terminal record were taken.
-- The tokens of a call stay reserved until it is confirmed; without that the cursor goes back, so a reply
-- that was lost with its gateway loses no token.
-- Returns {"unknown"|"released"|"expired"|"damaged" (the stream lacks tokens)} or {"busy", ms to wait}
-- or {"ok", cursor before, cursor after, end status or "", reason, message, record...}.
local h = redis.call('HMGET', KEYS[1], 'st', 'cur', 'rs', 'n', 'es', 'rn', 'em', 'rd', 'ot')
if not h[1] then return {'unknown'} end
if h[1] == 'released' then return {'released'} end
local n = tonumber(h[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if h[1] == 'ended' and redis.call('EXISTS', KEYS[2]) == 0 then return {'expired'} end
local cur = tonumber(h[2])
local reservation = h[3]
if reservation then
  local id, from, at = string.match(reservation, '^(.-)|(%d+)|(%d+)$')
  if id == ARGV[2] then
    reservation = false
  elseif id == ARGV[1] or now - tonumber(at) >= tonumber(ARGV[3]) then
    cur = tonumber(from)
    reservation = false
  else
    return {'busy', tonumber(ARGV[3]) - (now - tonumber(at))}
  end
  if not reservation then redis.call('HDEL', KEYS[1], 'rs') end
end
local out = {'ok', cur, cur, h[5] or '', h[6] or '', h[7] or ''}
if cur < n or (cur == n and h[9]) then
  local first = cur < n and '(' .. cur .. '-18446744073709551615' or n .. '-1'
  local entries = redis.call('XRANGE', KEYS[2], first, '+', 'COUNT', ARGV[4])
  if #entries == 0 then return {'damaged'} end
  for _, e in ipairs(entries) do
    out[#out + 1] = e[2][2]
    local length, is_last = string.match(e[1], '^(%d+)-(%d)')
    out[3] = tonumber(length) + (h[9] and tonumber(is_last) or 0)
  end
end
if out[3] > cur then
  redis.call('HSET', KEYS[1], 'cur', out[3], 'rs', ARGV[1] .. '|' .. cur .. '|' .. string.format('%d', now), 'rd', 1)
elseif tonumber(h[2]) ~= cur then
  redis.call('HSET', KEYS[1], 'cur', cur, 'rd', 1)
elseif not h[8] then
  redis.call('HSET', KEYS[1], 'rd', 1)
end
return out
