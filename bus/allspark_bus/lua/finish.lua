-- Ends an open request from outside its worker and fences the worker off. KEYS: request, stream.
-- ARGV: status, reason, message, now_ms
-- Returns {"ended"|"already"|"released"|"unknown", worker, model, tag of its index entries}.
-- It works on damaged records as well, so that nothing is open for ever: a record that is no hash is deleted, and so
-- is a stream that cannot take the terminal record, with the tokens in it.
local function number(text, default)
  local value = tonumber(text)
  return value and value >= 0 and value < 2 ^ 53 and math.floor(value) or default
end
local h = redis.pcall('HMGET', KEYS[1], 'st', 'ep', 'n', 'wk', 'md', 'rt', 'tt', 'ix')
if h.err then
  redis.call('DEL', KEYS[1], KEYS[2])
  return {'unknown', '', '', ''}
end
if not h[1] then return {'unknown', '', '', ''} end
if h[1] == 'released' then return {'released', '', '', ''} end
if h[1] == 'ended' then return {'already', h[4] or '', h[5] or '', h[8] or ''} end
local ep, n = number(h[2], 0) + 1, number(h[3], 0)
local record = {v = 1, e = ep, p = n, s = tonumber(ARGV[1]), r = ARGV[2]}
if ARGV[3] ~= '' then record['x'] = ARGV[3] end
local entry = string.format('%.0f-1', n)
local added = redis.pcall('XADD', KEYS[2], entry, 'm', cmsgpack.pack(record))
if type(added) == 'table' then
  -- Only what is wrong with the stream itself: a full memory or a replica is no reason to delete anything.
  if string.sub(added.err, 1, 4) ~= 'ERR ' and string.sub(added.err, 1, 9) ~= 'WRONGTYPE' then return added end
  redis.call('DEL', KEYS[2])
  entry, record['p'] = '0-1', 0
  redis.call('XADD', KEYS[2], entry, 'm', cmsgpack.pack(record))
  redis.call('HSET', KEYS[1], 'n', 0, 'cur', 0)
end
redis.call('HSET', KEYS[1], 'st', 'ended', 'ep', ep, 'es', ARGV[1], 'rn', ARGV[2], 'em', ARGV[3], 'et', ARGV[4])
redis.call('HDEL', KEYS[1], 'body')
local kept = number(h[6], 3600000)
redis.call('PEXPIRE', KEYS[2], kept)
redis.call('PEXPIRE', KEYS[1], kept + number(h[7], 300000))
redis.call('PUBLISH', KEYS[2], entry)
return {'ended', h[4] or '', h[5] or '', h[8] or ''}
