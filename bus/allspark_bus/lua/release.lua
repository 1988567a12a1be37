-- Forgets a request; a tombstone stays for a while, with the epoch that a successor of the same uuid must exceed. KEYS: request, stream. ARGV: now_ms
-- Returns {"ok"|"released"|"unknown", worker, model, "open"|"ended", tag of its index entries}.
-- A damaged record is forgotten like any other.
local h = redis.pcall('HMGET', KEYS[1], 'st', 'wk', 'md', 'tt', 'ep', 'ix', 'im', 'n')
if h.err then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('PUBLISH', KEYS[2], 'released')
  return {'ok', '', '', 'ended', ''}
end
if not h[1] then return {'unknown', '', '', '', ''} end
if h[1] == 'released' then return {'released', '', h[7] or '', '', h[6] or ''} end
redis.call('DEL', KEYS[1], KEYS[2])
if (tonumber(h[4]) or 0) > 0 then
  redis.call('HSET', KEYS[1], 'st', 'released', 'ep', tonumber(h[5]) and h[5] or 0, 'et', ARGV[1],
    'im', h[3] or '', 'ix', h[6] or '', 'nt', tonumber(h[8]) and h[8] or '')
  redis.call('PEXPIRE', KEYS[1], h[4])
end
redis.call('PUBLISH', KEYS[2], 'released')
return {'ok', h[2] or '', h[3] or '', h[1], h[6] or ''}
