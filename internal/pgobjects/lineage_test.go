package pgobjects

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Two standbys of one primary that are promoted one after the other have timelines of the same number.
func TestEachFailoverIsLoggedOnceWhateverTheNumberOfItsTimeline(t *testing.T) {
	var log bytes.Buffer
	table := &Table{cfg: Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}}
	look := func(lineage, nonce string) {
		table.tellLineage(&lineageLook{lineage: lineage, marked: lineageMark{Lineage: lineage, Nonce: nonce}})
	}
	for _, is := range []struct {
		lineage, nonce string
		told           int
	}{{"1/00000001", "a", 0}, {"1/00000002", "b", 1}, {"1/00000002", "b", 1}, {"1/00000002", "c", 2}, {"1/00000003", "d", 3}} {
		look(is.lineage, is.nonce)
		require.Equal(t, is.told, strings.Count(log.String(), "has failed over"), is)
	}
}
