-- Counts a request of a tenant with limits, unless one of them is in the way. KEYS: use, rate of the tenant.
-- ARGV: request id, tag of the admission, tokens, max_requests, max_tokens, tokens per second, burst (0: no limit),
-- how many of the tokens come back if they are not generated.
-- An id that is counted already is counted with the larger of both numbers and gets the new tag: who removes the
-- entry of the request before cannot remove this one. An entry is: tag, tokens, ms since when, and of what its rate was
-- charged, how much this admission was, and how much comes back with tokens that are not generated.
-- Returns {"ok"|"requests"|"tokens"|"rate", open requests, their tokens, ms to wait}.
local h = redis.call('HMGET', KEYS[1], ARGV[1], 'requests', 'tokens')
local requests, tokens = tonumber(h[2] or 0), tonumber(h[3] or 0)
local work, more, count = tonumber(ARGV[3]), tonumber(ARGV[3]), requests + 1
local charged, unused = 0, 0
if h[1] then
  local tag, before = string.match(h[1], '^(%S+) (%d+) ')
  unused = tonumber(string.match(h[1], '^%S+ %d+ %d+ %d+ (%d+)$') or 0)
  if tag == ARGV[2] then return {'ok', requests, tokens, 0} end -- sent again: the first answer was lost
  more, count = math.max(0, work - tonumber(before)), requests
  work = tonumber(before) + more
end
local max_requests, max_tokens = tonumber(ARGV[4]), tonumber(ARGV[5])
if max_requests > 0 and count > max_requests and not h[1] then return {'requests', requests, tokens, 0} end
if max_tokens > 0 and more > 0 and tokens + more > max_tokens then return {'tokens', requests, tokens, 0} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rate, burst = tonumber(ARGV[6]), tonumber(ARGV[7])
if rate > 0 and more > 0 then
  -- A token bucket. What is larger than the bucket needs a full one, and leaves a debt.
  local b = redis.call('HMGET', KEYS[2], 'level', 'at')
  local level = b[1] and math.min(burst, b[1] + math.max(0, now - b[2]) * rate / 1000) or burst
  local need = math.min(more, burst)
  if level < need then return {'rate', requests, tokens, math.ceil((need - level) / rate * 1000)} end
  redis.call('HSET', KEYS[2], 'level', tostring(level - more), 'at', string.format('%d', now))
  redis.call('PEXPIRE', KEYS[2], math.ceil((burst - level + more) / rate * 1000) + 1000)
  charged = more
end
unused = math.min(tonumber(ARGV[8]), unused + charged)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%s %d %d %d %d', ARGV[2], work, now, charged, unused),
  'requests', count, 'tokens', string.format('%d', tokens + more))
return {'ok', count, tokens + more, 0}
