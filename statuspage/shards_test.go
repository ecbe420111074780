package statuspage_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/statuspage"
)

func TestTheStatusPageShowsShards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.MigrateClaims(t, store)
		session, err := claims.NewSession(store, claims.SessionConfig{Holder: "a", Logger: testkit.Quiet})
		require.NoError(t, err)
		var fails atomic.Bool
		part, err := shards.New(session, shards.Config{Kind: "part", Count: 3, Logger: testkit.Quiet, Work: func(ctx context.Context, id string) error {
			if fails.Load() && id == "1" {
				return errors.New("<b>no disk")
			}
			<-ctx.Done()
			return nil
		}})
		require.NoError(t, err)
		h := statuspage.Shards(part)
		_, page := get(t, h, "/", browser)
		wantAll(t, "at first, the", page, `<span class="state wait">not taking part</span> 0 of 3`, "<title>shards of part: not taking part</title>", "It has no shard.")

		ctx, cancel := context.WithCancel(t.Context())
		returned := make(chan error)
		go func() { returned <- session.Run(ctx) }()
		go func() { returned <- part.Run(ctx) }()
		time.Sleep(time.Second / 2)
		_, page = get(t, h, "/", browser)
		wantAll(t, "a new one's", page, `<span class="state wait">settling</span> 0 of 3`, "<dd>1, 0 of them settled</dd>")
		fails.Store(true)
		time.Sleep(5 * time.Second)
		_, page = get(t, h, "/", browser)
		wantAll(t, "the", page, `<span class="state bad">failing</span> 3 of 3`, "<dt>should have</dt><dd>3</dd>",
			`<tr><td data-name="shard">1</td><td data-name="state"><span class="state bad">fails</span>`, "&lt;b&gt;no disk",
			`<tr><td data-name="shard">0</td><td data-name="state"><span class="state good">runs</span></td><td data-name="since">4.`, `<td data-name="failures">0</td>`)

		response, data := get(t, h, "/", "")
		require.Equal(t, "application/json", response.Header.Get("Content-Type"))
		var statuses []shards.Status
		require.NoError(t, json.Unmarshal([]byte(data), &statuses))
		require.Len(t, statuses, 1)
		require.Equal(t, 1, statuses[0].Failing)
		cancel()
		require.NoError(t, <-returned)
		require.NoError(t, <-returned)
	})
}

// part is a member with the status that a test gives it.
type part shards.Status

func (p part) Status() shards.Status { return shards.Status(p) }

func TestTheStatusPageShowsTheTroubleOfShards(t *testing.T) {
	one := []shards.ShardStatus{{ID: "0"}, {ID: "1", Stopping: time.Now().Add(-30 * time.Second), Stuck: true}, {ID: "2", Stopping: time.Now()}}
	for want, status := range map[string]shards.Status{
		`<span class="state bad">stuck</span>`:     {Session: "s", Settled: true, Share: 3, Shards: one, Stuck: 1, Failing: 1, Unhealthy: "no disk"},
		`<span class="state bad">unhealthy</span>`: {Session: "s", Settled: true, Failing: 1, Unhealthy: "no disk"},
		`<span class="state wait">moving</span>`:   {Session: "s", Settled: true, Share: 4, Shards: one},
		`<span class="state good">settled</span>`:  {Session: "s", Settled: true, Share: 3, Shards: one},
	} {
		_, page := get(t, statuspage.Shards(part(status)), "/", browser)
		wantAll(t, "a", page, want)
		if status.Stuck > 0 {
			wantAll(t, "a stuck one's", page, "<tbody>\n"+`<tr><td data-name="shard">1</td><td data-name="state"><span class="state bad">does not stop for 30 s</span>`,
				`<span class="state wait">stops</span>`, "have not returned: 1", `<dd class="bad">no disk</dd>`)
		}
	}
	response, body := get(t, statuspage.Shards(), "/", browser)
	require.Equal(t, http.StatusOK, response.StatusCode)
	wantAll(t, "no shards'", body, "No shards.")
}
