-- Ends an open request from outside its worker and fences the worker off. KEYS: request, stream.
-- ARGV: status, reason, message, now_ms
-- Returns {"ended"|"already"|"released"|"unknown", worker, model}.
local h = redis.call('HMGET', KEYS[1], 'st', 'ep', 'n', 'wk', 'md', 'rt', 'tt')
if not h[1] then return {'unknown', '', ''} end
if h[1] == 'released' then return {'released', '', ''} end
if h[1] == 'ended' then return {'already', h[4], h[5]} end
local ep, n = tonumber(h[2]) + 1, tonumber(h[3])
local record = {v = 1, e = ep, p = n, s = tonumber(ARGV[1]), r = ARGV[2]}
if ARGV[3] ~= '' then record['x'] = ARGV[3] end
redis.call('XADD', KEYS[2], n .. '-1', 'm', cmsgpack.pack(record))
redis.call('HSET', KEYS[1], 'st', 'ended', 'ep', ep, 'es', ARGV[1], 'rn', ARGV[2], 'em', ARGV[3], 'et', ARGV[4])
redis.call('HDEL', KEYS[1], 'body')
redis.call('PEXPIRE', KEYS[2], h[6])
redis.call('PEXPIRE', KEYS[1], h[6] + h[7])
redis.call('PUBLISH', KEYS[2], n .. '-1')
return {'ended', h[4], h[5]}
