package databases_test

import (
	neturl "net/url"
	"sync/atomic"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// countRoundTrips returns the URL of a proxy to that server, and a count of how often a
// client's message followed an answer of the server.
func countRoundTrips(t testing.TB, url string) (proxied string, trips func() int) {
	t.Helper()
	u, err := neturl.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	var count atomic.Int64
	proxy, err := rig.NewProxy(u.Host, func() rig.Tap {
		var answered atomic.Bool
		answered.Store(true)
		return rig.Tap{
			Sent: func([]byte) {
				if answered.Swap(false) {
					count.Add(1)
				}
			},
			Answered: func([]byte) { answered.Store(true) },
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	u.Host = proxy.Addr()
	return u.String(), func() int { return int(count.Load()) }
}
