"""The Lua scripts that keep a shelf within its bytes in any Redis, without touching that Redis's configuration.

A shelf is its values, `<prefix><key>` (strings with a time to live), and one ledger, `<prefix>ledger`: a sorted set of
`<key>:<bytes>` by time of last use in microseconds. Its member '' carries the total, negated, as its score: total and
entries share one Redis key, so they cannot be lost apart, and '' is always first.

The ledger may know values that are gone (expired, evicted by Redis): they count until they are the least recently used
or unused for a whole time to live. A value that the ledger lost is taken up again at its next look-up or store.
"""

ENTRY_BYTES = 300
"""Charged for each value beside its own bytes: what Redis needs to keep one (measured: 280 in Valkey 9.1)."""

_COMMON = f"""
local function now_us()
  local time = redis.call('TIME')
  return time[1] .. string.format('%06d', time[2])
end

local function used(ledger, entry, bytes, at)
  if redis.call('ZADD', ledger, at or now_us(), entry) == 1 then
    redis.call('ZINCRBY', ledger, -(bytes + {ENTRY_BYTES}), '')
  end
end

local function drop(ledger, entry, bytes)
  if redis.call('ZREM', ledger, entry) == 1 then
    redis.call('ZINCRBY', ledger, bytes + {ENTRY_BYTES}, '')
  end
end

local function is_sorted_set(ledger)
  local kind = redis.call('TYPE', ledger).ok
  return kind == 'zset' or kind == 'none'
end
"""

# Reads at most max_bytes + 1, so that a foreign value of any size costs little; a cut value does not unseal.
# pcall around the ledger: a hit stays a hit on a full or read-only Redis.
LOOK_UP = f"""
-- KEYS: value, ledger. ARGV: key, max_bytes. Returns the value, empty if there is none.
{_COMMON}
local value = redis.call('GETRANGE', KEYS[1], 0, ARGV[2])
if #value > 0 and #value <= tonumber(ARGV[2]) and is_sorted_set(KEYS[2]) then
  pcall(used, KEYS[2], ARGV[1] .. ':' .. #value, #value)
end
return value
"""

# A prefix is of use from its head on, so of what is there the first becomes the most recently used.
# One command notes all uses; it changes fewer entries than it is given if the ledger has lost one: each is noted then.
# Values are not among KEYS, but share the hash tag: one argument for all is much less work for the caller.
PRESENT = f"""
-- KEYS: ledger. ARGV: prefix, keys of one length joined, their number.
-- Returns one character for each key: 1 if it is there, else 0.
{_COMMON}
local function all_used(ledger, uses)
  if redis.call('ZADD', ledger, 'XX', 'CH', unpack(uses)) < #uses / 2 then
    for at = 1, #uses, 2 do
      used(ledger, uses[at + 1], tonumber(string.match(uses[at + 1], '%d+$')), uses[at])
    end
  end
end

local prefix, keys, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local length, now, there, uses = #keys / count, tonumber(now_us()), {{}}, {{}}
for index = 1, count do
  local key = string.sub(keys, (index - 1) * length + 1, index * length)
  local bytes = redis.pcall('STRLEN', prefix .. key)
  local found = type(bytes) == 'number' and bytes > 0
  there[index] = found and '1' or '0'
  if found then
    uses[#uses + 1] = now + count - index
    uses[#uses + 1] = key .. ':' .. bytes
  end
end
if #uses > 0 and is_sorted_set(KEYS[1]) then pcall(all_used, KEYS[1], uses) end
return table.concat(there)
"""

# The ledger is written before the value: if Redis stops between the two, it counts too much rather than too little.
# Victims are not among KEYS, but share the hash tag, so they live in the same slot of a cluster.
STORE = f"""
-- KEYS: value, ledger. ARGV: key, value, ttl_ms, bound, prefix. Returns how many values were evicted.
{_COMMON}
local ledger, bytes, ttl = KEYS[2], #ARGV[2], tonumber(ARGV[3])
if not is_sorted_set(ledger) then redis.call('DEL', ledger) end
if redis.call('TYPE', KEYS[1]).ok == 'string' then
  local old = redis.call('STRLEN', KEYS[1])
  drop(ledger, ARGV[1] .. ':' .. old, old)
end
used(ledger, ARGV[1] .. ':' .. bytes, bytes)
redis.call('SET', KEYS[1], ARGV[2], 'PX', ttl)
if redis.call('PTTL', ledger) < ttl then redis.call('PEXPIRE', ledger, ttl) end

local evicted, stale = 0, 0
while true do
  local oldest = redis.call('ZRANGE', ledger, 1, 1, 'WITHSCORES')
  if not oldest[1] then break end
  local full = -tonumber(redis.call('ZSCORE', ledger, '') or 0) > tonumber(ARGV[4])
  if not full then
    -- Unused for a whole time to live: its value has expired. A few at each store keep up with them.
    if stale == 8 or tonumber(oldest[2]) > tonumber(now_us()) - ttl * 1000 then break end
    stale = stale + 1
  end
  local key, size = string.match(oldest[1], '^(.*):(%d+)$')
  drop(ledger, oldest[1], tonumber(size))
  if redis.pcall('STRLEN', ARGV[5] .. key) == tonumber(size) then
    redis.call('UNLINK', ARGV[5] .. key)
    if full then evicted = evicted + 1 end
  end
end
return evicted
"""
