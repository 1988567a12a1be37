-- Appends tokens at their position, fenced by the epoch (R3). KEYS: request, stream.
-- ARGV: epoch, position, number of tokens, record [, status, reason, message, now_ms, 1 if it has tensors else 0]
-- Returns {code, tokens in the stream, tag of the index entries if it has ended}: 0 appended or already there, 1 the request has ended or is gone,
-- 2 stale epoch, 3 gap or partial overlap (go on at the returned position).
local h = redis.call('HMGET', KEYS[1], 'st', 'ep', 'n', 'rt', 'tt', 'ix')
if h[1] ~= 'open' then return {1, tonumber(h[3] or 0), h[6] or ''} end
local n = tonumber(h[3])
-- A damaged count is an error, and so ends the request; its worker would go back to a place that is none, for ever.
if n and (n < 0 or n % 1 ~= 0) then n = nil end
if h[2] ~= ARGV[1] then return {2, n or 0} end
local pos, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local last = ARGV[5] ~= nil
if pos ~= n then
  if pos + count <= n and not last then return {0, n} end
  return {3, n}
end
n = n + count
local entry = n .. (last and '-1' or '-0')
redis.call('XADD', KEYS[2], entry, 'm', ARGV[4])
redis.call('HSET', KEYS[1], 'n', n)
if last then
  redis.call('HSET', KEYS[1], 'st', 'ended', 'es', ARGV[5], 'rn', ARGV[6], 'em', ARGV[7], 'et', ARGV[8])
  if ARGV[9] == '1' then redis.call('HSET', KEYS[1], 'ot', 1) end
  redis.call('HDEL', KEYS[1], 'body')
  -- Defaults for a damaged record: an error here would leave an end that nobody is told of.
  local kept = tonumber(h[4]) or 3600000
  redis.call('PEXPIRE', KEYS[2], kept)
  redis.call('PEXPIRE', KEYS[1], kept + (tonumber(h[5]) or 300000))
end
redis.call('PUBLISH', KEYS[2], entry)
return {0, n, last and h[6] or ''}
