-- Raises the epoch by one compare-and-set: a dispatch (worker given) or a claim back into the queue (worker "").
-- KEYS: request. ARGV: expected epoch, worker, 1 if its worker died with it, broker that answers for it from now on
-- Returns {"ok"|"gone"|"stale", epoch, worker, deaths, tokens}. Repeating it after a lost reply answers the same.
-- Each death is noted with its epoch and worker, so that it can be taken back (survived.lua).
local h = redis.call('HMGET', KEYS[1], 'st', 'ep', 'wk', 'dt', 'n', 'br', 'de')
if h[1] ~= 'open' then return {'gone', h[2] or '0', h[3] or '', h[4] or '0', h[5] or '0'} end
local ep = tonumber(h[2])
local want = tonumber(ARGV[1])
if ep == want + 1 and h[3] == ARGV[2] and (h[6] or '') == ARGV[4] then return {'ok', h[2], h[3], h[4], h[5]} end
if ep ~= want then return {'stale', h[2], h[3], h[4], h[5]} end
local deaths = tonumber(h[4]) + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'ep', ep + 1, 'wk', ARGV[2], 'dt', deaths, 'br', ARGV[4])
if ARGV[3] == '1' then
  local death = ARGV[1] .. '=' .. string.gsub(h[3] or '', '%s', '_')
  redis.call('HSET', KEYS[1], 'de', (h[7] and h[7] .. ' ' or '') .. death)
end
return {'ok', tostring(ep + 1), ARGV[2], tostring(deaths), h[5]}
