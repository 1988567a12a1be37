-- Where a request stands, from the last entry of its stream. KEYS: request, stream.
-- Returns {"unknown"|"released"|"expired"} or
-- {"ok", id of the last entry or "", cursor, 1 if it was ever read, end status or "", reason, message, end_ms}.
local h = redis.call('HMGET', KEYS[1], 'st', 'cur', 'rd', 'es', 'rn', 'em', 'et')
if not h[1] then return {'unknown'} end
if h[1] == 'released' then return {'released'} end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
if h[1] == 'ended' and #last == 0 then return {'expired'} end
return {'ok', last[1] and last[1][1] or '', h[2], h[3] or '', h[4] or '', h[5] or '', h[6] or '', h[7] or ''}
