package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// writeTable writes the figures of one measure as a table in Markdown, aligned
// so that it reads well as it is: one row per peer, one column per metric in the
// order in which they were first added. Where the floor has the metric too, the
// others' figures are followed by their ratio to it.
func writeTable(w io.Writer, records []record, notes []note) error {
	var metrics, names []string
	cells := map[[2]string]record{}
	for _, r := range records {
		head := r.Metric
		if r.Unit != "" {
			head += ", " + r.Unit
		}
		if !slices.Contains(metrics, head) {
			metrics = append(metrics, head)
		}
		if !slices.Contains(names, r.Peer) {
			names = append(names, r.Peer)
		}
		cells[[2]string{r.Peer, head}] = r
	}
	slices.SortStableFunc(names, func(a, b string) int { return rank(a) - rank(b) })

	rows := [][]string{append([]string{""}, metrics...)}
	for _, name := range names {
		row := []string{name}
		for _, metric := range metrics {
			row = append(row, cell(cells, name, metric))
		}
		rows = append(rows, row)
	}
	var b strings.Builder
	if len(records) > 0 {
		writeAligned(&b, rows)
	}
	for _, n := range notes {
		fmt.Fprintf(&b, "\n- %s: %s", n.Peer, n.Text)
	}
	if len(notes) > 0 {
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// rank is the position of a peer in the tables. Unknown names come last.
func rank(name string) int {
	i := slices.IndexFunc(peers, func(p peer) bool { return p.name == name })
	if i < 0 {
		return len(peers)
	}
	return i
}

func cell(cells map[[2]string]record, name, metric string) string {
	r, ok := cells[[2]string{name, metric}]
	if !ok {
		return "–"
	}
	text := figure(r.Value)
	floor, ok := cells[[2]string{floorPeer.name, metric}]
	if ok && name != floorPeer.name && floor.Value > 0 {
		text += fmt.Sprintf(" (%s×)", figure(r.Value/floor.Value))
	}
	return text
}

// figure formats a number with three significant digits, or with all digits before the
// point.
func figure(v float64) string {
	decimals := 0
	switch a := max(v, -v); {
	case v == float64(int64(v)):
	case a < 1:
		return strconv.FormatFloat(v, 'g', 3, 64)
	case a < 10:
		decimals = 2
	case a < 100:
		decimals = 1
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}

func writeAligned(b *strings.Builder, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, text := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	for i, row := range rows {
		for j, text := range row {
			pad := strings.Repeat(" ", widths[j]-utf8.RuneCountInString(text))
			if j == 0 {
				b.WriteString("| " + text + pad + " |")
			} else {
				b.WriteString(" " + pad + text + " |")
			}
		}
		b.WriteString("\n")
		if i > 0 {
			continue
		}
		for j, width := range widths {
			if j == 0 {
				b.WriteString("|" + strings.Repeat("-", width+2) + "|")
			} else {
				b.WriteString(strings.Repeat("-", width+1) + ":|")
			}
		}
		b.WriteString("\n")
	}
}
