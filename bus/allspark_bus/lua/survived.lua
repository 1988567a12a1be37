-- A worker that was taken for dead says that it lives: it was not killed by the request, so the death that was
-- counted when the request was claimed from it is taken back. KEYS: request.
-- ARGV: epoch under which the worker held the request, how often in a row deaths are taken back without a token in between
-- Returns 1 if the worker still holds the request, else 0. Repeating it changes nothing.
local h = redis.call('HMGET', KEYS[1], 'st', 'ep', 'dt', 'de', 'n', 'tb')
if h[1] ~= 'open' then return 0 end
if h[2] == ARGV[1] then return 1 end
local left, is_counted = {}, false
for death in string.gmatch(h[4] or '', '%S+') do
  if string.match(death, '^%d+') == ARGV[1] then is_counted = true else left[#left + 1] = death end
end
if not is_counted then return 0 end
-- Who makes every worker fall silent for a while would else go round for ever.
local times, tokens = string.match(h[6] or '', '^(%d+) (%d+)$')
times = tokens == h[5] and tonumber(times) + 1 or 1
if times > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'dt', tonumber(h[3]) - 1, 'de', table.concat(left, ' '), 'tb', times .. ' ' .. h[5])
return 0
