//go:build unix

package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
)

// clockReport is what the store's clock did while doctor looked.
type clockReport struct {
	OffsetMS         float64 `json:"offset_ms"`         // from this machine's
	RatePercent      float64 `json:"rate_percent"`      // how much faster it ran than this machine's monotonic clock
	UncertainPercent float64 `json:"uncertain_percent"` // of the rate
}

// measure renews the lease for some time, and reads the store's clock meanwhile.
func (d *diagnosis) measure(ctx context.Context, store database, lease *tenure.Lease, term *tenure.Term, look time.Duration) error {
	pg, _ := store.(*tenure.PostgresStore)
	var took []time.Duration
	var samples []clockSample
	for began := time.Now(); ; {
		if pg != nil {
			s, err := readClock(ctx, pg)
			if err != nil {
				return err
			}
			samples = append(samples, s)
		}
		if len(took) > 0 && time.Since(began) >= look {
			break
		}
		for range 10 {
			sent := time.Now()
			if err := lease.Renew(ctx, term); err != nil {
				return fmt.Errorf("after %d renewals: %w", len(took), err)
			}
			took = append(took, time.Since(sent))
		}
		select { // a holder renews every few seconds, and a store should not notice the examination
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	slices.Sort(took)
	inMS := func(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1000 }
	d.Renewals, d.RenewalP50, d.RenewalP99 = len(took), inMS(took[len(took)/2]), inMS(took[len(took)*99/100])
	d.TTL = ttlFor(took[len(took)*99/100]).Seconds()
	if d.RenewalP50 > 250 {
		d.add("latency", warning(fmt.Sprintf("half of the renewals took longer than %.0f ms", d.RenewalP50), "look for load, locks and the way to the server"))
	}
	if len(samples) > 1 {
		d.judgeClock(samples)
	}
	return nil
}

// ttlFor returns the TTL to recommend: the default, unless a hundred slow renewals would not fit into it.
func ttlFor(slow time.Duration) time.Duration {
	for _, ttl := range []time.Duration{tenure.DefaultTTL, 2 * time.Minute} {
		if slow*100 <= ttl {
			return ttl
		}
	}
	return 10 * time.Minute
}

// clockSample is one reading of the store's clock.
type clockSample struct {
	at     time.Time     // the middle of the call, by this machine
	offset time.Duration // of the store's clock then
	trip   time.Duration // how long the call took
}

func readClock(ctx context.Context, store *tenure.PostgresStore) (clockSample, error) {
	var now time.Time
	sent := time.Now()
	// Unqualified, as in the statements of leases, which a search_path could lead to another func.
	err := store.Pool().QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now)
	trip := time.Since(sent)
	at := sent.Add(trip / 2)
	return clockSample{at, now.Sub(at), trip}, err
}

// judgeClock compares the clocks at the beginning and at the end, each by the quickest of some readings.
func (d *diagnosis) judgeClock(samples []clockSample) {
	quick := func(some []clockSample) clockSample {
		return slices.MinFunc(some, func(a, b clockSample) int { return int(a.trip - b.trip) })
	}
	some := max(1, len(samples)/4)
	first, last := quick(samples[:some]), quick(samples[len(samples)-some:])
	between := last.at.Sub(first.at).Seconds()
	if between <= 0 {
		return
	}
	percent := func(t time.Duration) float64 { return math.Round(t.Seconds()/between*1e5) / 1000 }
	d.Clock = &clockReport{
		OffsetMS: math.Round(last.offset.Seconds() * 1000), RatePercent: percent(last.offset - first.offset), UncertainPercent: percent((first.trip + last.trip) / 2),
	}
	if off := last.offset.Abs(); off > time.Minute {
		d.add("clock_offset", warning(fmt.Sprintf("the server's clock is %v from this machine's; leases don't compare them, but people who read times do", off.Round(time.Second)), "set the clock that is wrong"))
	}
	const rate = 1 // percent; the default Margin allows 3 % between a holder and the store
	if math.Abs(d.Clock.RatePercent) > rate+d.Clock.UncertainPercent {
		d.add("clock_rate", fault(fmt.Sprintf("the server's clock runs %+.1f %% faster than this machine's; two may hold if it is more than Margin/TTL, 3 %% by default", d.Clock.RatePercent),
			"correct it, or set Expiry: ExpiryObserved and a larger Margin"))
	}
}

// wakeUps measures how soon a watch of the lease is woken.
func (d *diagnosis) wakeUps(ctx context.Context, store database, lease *tenure.Lease, term *tenure.Term, watch tenure.Subscription, log *findings) error {
	if _, ok := store.(*tenure.SQLiteStore); ok {
		return nil // what wakes others is a look at the file, 20 times a second
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	const deaf = "standbys are not woken"
	for !watch.Live() {
		select {
		case <-watch.C():
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
		if ctx.Err() != nil || log.said(deaf) {
			if !log.said(deaf) {
				d.add("wake_up", warning(deaf+", and poll", "see docs/postgres.md, Wake-ups"))
			}
			return nil
		}
	}
	var took []time.Duration
	for range 5 {
		for len(watch.C()) > 0 {
			<-watch.C()
		}
		sent := time.Now()
		if notifier, ok := store.(tenure.Notifier); ok {
			if err := notifier.Wake(ctx, lease.Key()); err != nil {
				return err
			}
		} else if err := lease.Renew(ctx, term); err != nil { // which is an event
			return err
		}
		select {
		case <-watch.C():
			took = append(took, time.Since(sent))
		case <-time.After(2 * time.Second):
			d.add("wake_up", warning("a wake-up did not arrive within 2 s: standbys look within their TTL", "see docs/postgres.md, Wake-ups"))
			return nil
		case <-ctx.Done():
			return nil
		}
	}
	slices.Sort(took)
	d.WakeUp = math.Round(took[len(took)/2].Seconds()*1e6) / 1000
	return nil
}
