package tenure

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/record"
)

func TestTimeIsLeftByWhicheverClockSaysThatLessIs(t *testing.T) {
	attempt := clock.Process()
	now := attempt
	term := &Term{id: "a", trusted: time.Hour, clock: func() clock.Reading { return now }}
	term.trust.Store(newTrust(attempt, term.trusted))
	for name, test := range map[string]struct {
		mono, wall, left time.Duration
	}{
		"at once":                        {0, 0, time.Hour},
		"later":                          {time.Minute, time.Minute, 59 * time.Minute},
		"suspended for half an hour":     {time.Minute, 31 * time.Minute, 29 * time.Minute},
		"a wall clock that is ahead":     {0, time.Minute, 59 * time.Minute},
		"a wall clock that was set back": {time.Minute, -time.Hour, 59 * time.Minute},
	} {
		now = clock.Reading{Mono: attempt.Mono.Add(test.mono), Wall: attempt.Wall.Add(test.wall)}
		require.Equal(t, test.left, term.Remaining(), name)
		require.Equal(t, test.left, term.Deadline().Sub(now.Mono), name)
		require.Equal(t, time.Hour-test.left, term.sinceRenewal(), name)
	}
	now = clock.Reading{Mono: attempt.Mono, Wall: attempt.Wall.Add(time.Hour)}
	require.False(t, term.Valid(), "after a suspend")
	require.Zero(t, term.Remaining())
	now = attempt
	require.False(t, term.Valid(), "a wall clock that is set back revives no term")
}

func TestAFencedWriteGivesWayToARenewalButNotForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var term Term
		waits := func(ctx context.Context) time.Duration {
			began := time.Now()
			term.giveWay(ctx)
			return time.Since(began)
		}
		require.Zero(t, waits(t.Context()), "without a renewal")
		done := term.renewal()
		go func() { time.Sleep(10 * time.Millisecond); done() }()
		require.Equal(t, 10*time.Millisecond, waits(t.Context()), "for a renewal of 10ms")
		require.Zero(t, waits(t.Context()), "after a renewal")
		done = term.renewal()
		defer done()
		require.Equal(t, 100*time.Millisecond, waits(t.Context()), "for a renewal that hangs")
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.Equal(t, time.Millisecond, waits(ctx), "with a context that ends")
	})
}

func TestHowAStandbyWaitsAfterAnAttempt(t *testing.T) {
	const interval, ttl, late = 5 * time.Second, 30 * time.Second, 6 * time.Millisecond
	held := func(expiresIn time.Duration, byAge bool) error {
		return &HeldError{canExpireIn: expiresIn, byAge: byAge}
	}
	for name, test := range map[string]struct {
		err           error
		live, follows bool
		least, most   time.Duration
		ignores       bool
	}{
		"held, hints are live":                            {held(20*time.Second, true), true, false, 20 * time.Second, 20*time.Second + late, false},
		"held, no hints":                                  {held(20*time.Second, true), false, false, interval * 3 / 4, interval, false},
		"held, and expires soon":                          {held(time.Second, true), false, false, time.Second, time.Second + late, false},
		"held with another's TTL":                         {held(time.Hour, true), true, false, ttl, ttl, false},
		"held by another program":                         {held(20*time.Second, false), true, false, interval * 3 / 4, interval, false},
		"by another program, expires soon":                {held(time.Second, false), true, false, time.Second, time.Second, false},
		"only its silence counts, each renewal is seen":   {held(20*time.Second, false), true, true, 20 * time.Second, 20*time.Second + late, false},
		"only its silence counts, and no renewal is seen": {held(20*time.Second, false), false, false, interval * 3 / 4, interval, false},
		"another was quicker":                             {held(0, false), true, false, interval * 3 / 4, interval, false},
		"connection refused":                              {errors.New("connection refused"), true, false, interval * 3 / 4, interval, false},
		"needs a person":                                  {ErrSetup, true, false, ttl * 3 / 4, ttl, true},
		"not fit":                                         {ErrUnhealthy, true, false, interval * 3 / 4, interval, true},
		"too slow":                                        {ErrDeadline, true, false, interval * 3 / 4, interval, true},
	} {
		for range 100 {
			wait := afterAttempt(test.err, interval, ttl, test.live, test.follows)
			require.GreaterOrEqual(t, wait.longest, test.least, name)
			require.LessOrEqual(t, wait.longest, test.most, name)
			require.Equal(t, test.ignores, wait.ignoreHints == wait.longest, name)
		}
	}
	require.LessOrEqual(t, afterAttempt(ErrSetup, interval, time.Hour, true, true).longest, time.Minute, "whatever the TTL")
}

func TestWhichVersionsOfItsRecordATermTakesForItsOwn(t *testing.T) {
	here, there := Lineage{Mark: "a", Server: "1"}, Lineage{Mark: "b", Server: "2"}
	for name, test := range map[string]struct {
		since   func(p *position) // the answer to the write that began the term, as version 10
		seen    int64
		known   int64
		resumed bool
		request *record.Request
		ours    bool
		next    int64 // the version that the next renewal expects
	}{
		"its last":                              {func(*position) {}, 10, 10, false, nil, true, 10},
		"a later one, by a copy":                {func(*position) {}, 11, 10, false, nil, false, 10},
		"a later one, a write being unanswered": {func(p *position) { p.startRenewal() }, 11, 10, false, nil, true, 11},
		"the same, when it was refused":         {func(p *position) { version, _, _ := p.startRenewal(); p.refused(version) }, 11, 10, false, nil, false, 10},
		"the same, of a resumed term":           {func(p *position) { p.startRenewal() }, 11, 10, true, nil, false, 10},
		"a request's, made to its last":         {func(*position) {}, 11, 10, false, &record.Request{Version: 10}, true, 11},
		"a request's, made to a copy's":         {func(*position) {}, 12, 10, false, &record.Request{Version: 11}, false, 10},
		"an earlier one, after a failover":      {func(p *position) { p.confirmRenewal(20, here) }, 10, 20, false, nil, true, 10},
		"an earlier one, by a slow read":        {func(p *position) { p.confirmRenewal(20, here) }, 10, 10, false, nil, true, 20},
		"the second write after a refusal of the first is in doubt": {func(p *position) {
			p.startRenewal()
			version, _, _ := p.startRenewal()
			p.refused(version)
		}, 11, 10, false, nil, true, 11},
		"a write that expected an earlier version is not": {func(p *position) {
			p.startRenewal()
			p.confirmRenewal(20, here)
		}, 21, 20, false, nil, false, 20},
	} {
		p := position{inDoubt: 1, on: here}
		p.acquired(10, here)
		test.since(&p)
		require.Equal(t, test.ours, p.recognise(test.known, test.seen, test.resumed, test.request), name)
		version, _ := p.last()
		require.Equal(t, test.next, version, name)
	}

	p := position{inDoubt: 1, on: here}
	p.acquired(10, here)
	p.confirmRenewal(20, here)
	p.noteLost(0, there)
	require.Equal(t, here, p.vouchedBy(), "a record that was seen vouches for nothing")
	_, on, cond := p.startRenewal()
	require.Equal(t, there, on)
	require.NoError(t, cond.CheckServer("2"))
	require.ErrorIs(t, cond.CheckServer("1"), ErrMoved)
	require.Equal(t, int64(20), cond.Least(), "the record is written again above all that its term had")
	p.confirmRenewal(21, there)
	is, lost := p.takeFailover()
	require.True(t, is && lost)
	is, lost = p.takeFailover()
	require.False(t, is || lost, "it is said once")
}
