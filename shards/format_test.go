package shards_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit/golden"
	"github.com/tenurelib/tenure/shards"
)

func TestTheStatusInJSONStaysAsItIs(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	golden.Compare(t, "status", golden.JSON(t,
		shards.Status{
			Kind: "partition", Session: "0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d", Members: 3, Counted: 2, Settled: true, Share: 2, Count: 4,
			Shards: []shards.ShardStatus{
				{ID: "0", Token: 1767323045678000, Since: at},
				{
					ID: "1", Token: 1767323045678001, Since: at, Stopping: at.Add(time.Minute), Stuck: true,
					Failing: true, Failures: 2, Error: "connection refused",
				},
			},
			Stuck: 1, Failing: 1, Unhealthy: "disk is full", Claimed: 5, GivenUp: 3,
		},
		shards.Status{Kind: "partition", Count: 4, Shards: []shards.ShardStatus{}}))
}

var uuid = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`)

func TestTheClaimsOfShardsStayAsTheyAre(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		p := w.start("a")
		time.Sleep(time.Minute)
		rows, err := w.store.DB().Query(`SELECT kind || ' ' || id FROM objects_claims WHERE session = ? ORDER BY kind, id`, p.session.ID())
		require.NoError(w, err)
		defer rows.Close()
		var got strings.Builder
		for rows.Next() {
			var claim string
			require.NoError(w, rows.Scan(&claim))
			got.WriteString(uuid.ReplaceAllString(claim, "UUID") + "\n")
		}
		require.NoError(w, rows.Err())
		golden.Compare(w, "claims", got.String())
	})
}
