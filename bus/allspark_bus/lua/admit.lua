-- Records a request, once. KEYS: request, stream.
-- ARGV: digest, body, model, epoch, worker, created_ms, deadline_ms, priority, result_ttl_ms, tombstone_ttl_ms, sent_ms,
--       tag of its index entries, broker that answers for it
-- The two TTLs stay in the record, so whoever ends the request keeps its result as long as was promised here.
-- After a tombstone the epoch is above the released request's, so that its worker cannot append to this one.
-- Returns {"new"|"same"|"conflict"|"late", epoch, worker, tag of the request that is there}.
local h = redis.call('HMGET', KEYS[1], 'st', 'dg', 'ep', 'wk', 'et', 'ix')
if h[1] and h[1] ~= 'released' then
  if h[2] == ARGV[1] then return {'same', h[3], h[4], h[6] or ''} end
  return {'conflict', h[3], h[4], h[6] or ''}
end
-- A copy of a call that was overtaken by another copy and by the release must not run the request again.
local sent = tonumber(ARGV[11])
if h[5] and sent > 0 and sent < tonumber(h[5]) then return {'late', h[3] or '0', '', h[6] or ''} end
local epoch = ARGV[4]
if h[3] and tonumber(h[3]) >= tonumber(epoch) then epoch = tostring(tonumber(h[3]) + 1) end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'st', 'open', 'dg', ARGV[1], 'body', ARGV[2], 'md', ARGV[3], 'ep', epoch,
  'wk', ARGV[5], 'cr', ARGV[6], 'dl', ARGV[7], 'pr', ARGV[8], 'n', 0, 'cur', 0, 'dt', 0, 'rt', ARGV[9], 'tt', ARGV[10],
  'ix', ARGV[12], 'br', ARGV[13])
return {'new', epoch, ARGV[5], ARGV[12]}
